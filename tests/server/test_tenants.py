"""Keys over the real engine: what one tenant computed, no other finds. And the watch on steps beside a long prompt."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from server.keys import KeyFile
from tests.server.live import Live, serve

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
LONG = "a secret that takes some pages " * 8


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {ALICE}\nbob {BOB}\n")
    async with serve(KeyFile(keys), max_model_len=1024) as live:
        yield live


async def cached(client: httpx.AsyncClient, key: str) -> int:
    body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
    answer = await client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def test_pages_are_shared_within_a_key_and_not_between_keys(live: Live) -> None:
    pages = (len(LONG) - 1) // 32 * 32
    async with live.client() as client:
        assert await cached(client, ALICE) == 0
        assert await cached(client, BOB) == 0
        assert await cached(client, ALICE) == pages > 200
        assert await cached(client, BOB) == pages
    async with grpc.aio.insecure_channel(f"127.0.0.1:{live.grpc}") as channel:
        request = pb.GenerateRequest(model="tiny", text=LONG, sampling=pb.SamplingParams(max_tokens=2))
        for key in (ALICE, BOB):
            call = InferenceServiceStub(channel).Generate(request, metadata=[("authorization", f"Bearer {key}")])
            *_, last = [message async for message in call]
            assert last.finish.usage.cached_tokens == pages


async def test_a_long_prompt_is_many_short_steps(tmp_path: Path) -> None:
    """The watch is on steps: one that hangs is seen, a prompt of 7000 tokens is none."""
    async with serve(max_model_len=8192, max_step_tokens=128, kv_memory=64 * 2**20) as live, live.client() as client:
        body = {"model": "tiny", "prompt": "x" * 7000, "max_tokens": 1}
        started = time.monotonic()
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        longest, num_ready = 0.0, 0
        while not asking.done():
            longest = max(longest, live.engine.step_seconds)
            num_ready += (await client.get("/health/ready")).status_code == 200
            await asyncio.sleep(0.02)  # else this loop keeps the engine's thread from its work
        total = time.monotonic() - started
        assert asking.result().json()["usage"]["prompt_tokens"] == 7000
        assert num_ready > 3 and 0 < longest < total / 4
