"""Clients that leave at any moment, over either protocol: what they held is free again, and others never notice."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator

import grpc
import pytest

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.server.conftest import within
from tests.server.live import Live, serve

NUM_LEAVING = 1000
AT_ONCE = 24
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with serve() as live:
        yield live


def body_of(rng: random.Random) -> dict[str, object]:
    """Short and long prompts with shared beginnings, one or more choices, long outputs."""
    prompt = ("shared " * 40)[: rng.choice([7, 100, 260])] + "".join(rng.choices("abc ", k=rng.randint(1, 300)))
    return {"model": "tiny", "prompt": prompt, "n": rng.choice([1, 1, 3]), "max_tokens": 400, "ignore_eos": True,
            "stream": rng.random() < 0.5}  # fmt: skip


async def leave_http(live: Live, rng: random.Random) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", live.http)
    body = body_of(rng)
    payload = json.dumps(body).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: q\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload)
    writer.write(request[: rng.choice([len(request), len(request), len(request), rng.randrange(len(request))])])
    await writer.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.random() * 0.1):
            await reader.read(1)  # until the answer has begun, or not even so long
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
    else:
        writer.close()


async def leave_grpc(live: Live, rng: random.Random) -> None:
    fields = body_of(rng)
    sampling = pb.SamplingParams(max_tokens=400, ignore_eos=True)
    request = pb.GenerateRequest(model="tiny", text=fields["prompt"], n=fields["n"], sampling=sampling)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{live.grpc}")
    way = rng.choice(["cancel", "deadline", "close"])
    call = InferenceServiceStub(channel).Generate(request, timeout=rng.random() * 0.05 if way == "deadline" else 60)
    with contextlib.suppress(TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError):
        async with asyncio.timeout(rng.random() * 0.1):
            await call.read()
    if way == "cancel":
        call.cancel()
    await channel.close()


async def test_a_thousand_that_leave(live: Live) -> None:
    golden = {"model": "tiny", "prompt": "golden", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    async with live.client() as client:
        expected = (await client.post("/v1/completions", json=golden)).json()["choices"][0]["text"]
        turns = iter(range(NUM_LEAVING))

        async def leave() -> None:
            for number in turns:
                rng = random.Random(number)
                await (leave_grpc if number % 4 == 0 else leave_http)(live, rng)

        async def watch() -> int:
            """The same request again and again, in whatever company."""
            num_seen = 0
            while not leaving.done():
                answer = await client.post("/v1/completions", json={**golden, "priority": -1})
                assert answer.status_code in (200, 429), answer.text
                if answer.status_code == 200:
                    num_seen += 1
                    assert answer.json()["choices"][0]["text"] == expected
            return num_seen

        leaving = asyncio.gather(*(leave() for _ in range(AT_ONCE)))
        num_seen = await within(watch(), 150)
        await leaving
        assert num_seen > 0
        await within(live.service.wait_idle(), 30)
        aborted = live.counted("requests_aborted")
        assert aborted["client"] + aborted["deadline"] > NUM_LEAVING / 4 and aborted["failure"] == 0, aborted
        snapshot = await within(live.engine.inspect(check=True), 30)
        assert (snapshot.num_running, snapshot.num_waiting) == (0, 0)
        for tier in snapshot.tiers:
            assert all(num == 0 for state, num in tier.pages.items() if state not in ("free", "cached")), tier
        assert (await client.post("/v1/completions", json=golden)).json()["choices"][0]["text"] == expected
    for _ in range(200):  # a task ends some turns of the loop after its call
        left = [task for task in asyncio.all_tasks() if "Generate" in repr(task.get_coro())]
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(left)
