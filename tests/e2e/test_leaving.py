"""A client that leaves gives back all pages within a step, whatever it was waiting for, over either protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.load import load_engine
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from server.config import ServerConfig
from server.grpc import GrpcServer
from server.http import build_app
from server.ports import bind_grpc, bind_http
from server.service import Service
from server.web import http_server
from tests.gate import Gate
from tests.helpers import random_prompt
from tests.server.conftest import LIMITS

PROMPT = random_prompt(1, 150)
BODY = {"model": "lively", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}


@dataclass
class Running:
    """Both front ends over a real engine whose steps the test lets through."""

    engine: Engine
    gate: Gate
    service: Service
    http: str
    grpc: str

    @property
    def num_held(self) -> int:
        pools = self.engine.core.scheduler.pools.cache
        return pools.open.num_held + pools.sealed.num_held


@pytest.fixture
async def running(model_folder: Path) -> AsyncIterator[Running]:
    config = EngineConfig(
        model=str(model_folder),
        kv_format="int4",
        kv_memory=8 * 2**20,
        page_tokens=32,
        max_num_seqs=4,
        max_step_tokens=64,
        device="cpu",
        dtype="float32",
    )
    engine = load_engine(config, lambda done, total: None)
    gate = Gate.before(engine)
    engine.start()
    service = Service(engine)
    grpc_server, web = GrpcServer(LIMITS), http_server(build_app(service), LIMITS)
    grpc_port = bind_grpc(grpc_server, ServerConfig(grpc_port=0))
    await grpc_server.start(service)
    with bind_http(ServerConfig(http_port=0)) as socket:
        serving = asyncio.create_task(web.serve(sockets=[socket]))
        try:
            await until(lambda: web.started)
            http = f"http://127.0.0.1:{socket.getsockname()[1]}"
            yield Running(engine, gate, service, http, f"127.0.0.1:{grpc_port}")
        finally:
            gate.open()
            await asyncio.to_thread(engine.stop)
            await service.dialect.close()
            web.should_exit = True
            await asyncio.gather(serving, grpc_server.stop(0))


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that must happen, and fail instead of hanging when it does not."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


async def expect_release(running: Running) -> None:
    """The client has left while a step stands at the gate: that step is the last, and everything is free after it."""
    await until(lambda: not running.engine._inbox.empty())  # the cancel has come
    steps = running.gate.num_steps
    assert running.num_held > 0
    running.gate.open()
    await until(lambda: running.engine.core.is_idle)
    assert running.num_held == 0
    running.engine.core.scheduler.check()
    assert running.gate.num_steps == steps
    await asyncio.wait_for(running.service.wait_idle(), 20)
    # And the next one is served.
    async with httpx.AsyncClient(base_url=running.http, timeout=20) as client:
        answer = await client.post("/v1/completions", json={**BODY, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


async def steps(running: Running, count: int) -> None:
    """Let `count` steps through, and return when the next stands at the gate. The prompt takes the first three."""
    await running.gate.wait_for_step()
    for _ in range(count):
        running.gate.let_through()
        await running.gate.wait_for_step()


@pytest.mark.parametrize(
    ("path", "count"),
    [("/v1/completions", 0), ("/v1/completions", 1), ("/v1/completions", 6), ("/v1/chat/completions", 6)],
    ids=["before the first step", "in prefill", "in decode", "chat in decode"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_http_client_leaves(running: Running, count: int, path: str, stream: bool) -> None:
    body: dict[str, Any] = {**BODY, "stream": stream}
    if "chat" in path:
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "x" * 120}]
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as client:
        asking = asyncio.create_task(client.post(path, json=body))
        await steps(running, count)
        assert not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await expect_release(running)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "extra", [b"\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 9], ids=["blank", "pipelined"]
)
async def test_http_client_sends_more_and_leaves(running: Running, extra: bytes, stream: bool) -> None:
    """Bytes behind the request made the server stop reading, and so miss that the client had gone."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.http.rsplit(":", 1)[1]))
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    await steps(running, 6)
    writer.write(extra)
    await writer.drain()
    await asyncio.sleep(0.1)  # so that the end comes in a read of its own, which is what was missed
    writer.close()
    await expect_release(running)


async def test_http_stream_is_left_while_reading(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as client:
        request = client.stream("POST", "/v1/completions", json={**BODY, "stream": True})
        reading = asyncio.create_task(request.__aenter__())
        await steps(running, 30)
        response = await asyncio.wait_for(reading, 20)
        assert response.status_code == 200
        assert (await asyncio.wait_for(anext(response.aiter_lines()), 20)).startswith("data: ")
        await request.__aexit__(None, None, None)
        await expect_release(running)


@pytest.mark.parametrize("count", [1, 6], ids=["in prefill", "in decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_grpc_client_leaves(running: Running, how: str, count: int) -> None:
    message = pb.GenerateRequest(
        model="lively",
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(max_tokens=300, ignore_eos=True),
    )
    channel = grpc.aio.insecure_channel(running.grpc)
    call = InferenceServiceStub(channel).Generate(message, timeout=2 if how == "deadline" else None)
    reading = asyncio.ensure_future(call.read())
    await steps(running, count)
    if how == "cancel":
        call.cancel()
    elif how == "close":
        await channel.close()
    else:
        assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.gather(reading, return_exceptions=True)
    await expect_release(running)
    await channel.close()
