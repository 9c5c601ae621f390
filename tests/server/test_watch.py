"""The pool, watched: over HTTP as server-sent events, over gRPC as a stream."""

import asyncio
import json

import grpc
import httpx
import pytest

from engine.errors import ErrorKind, RequestError
from proto.quire.v1 import inference_pb2 as pb
from server.service import Service
from tests.fakes import SNAPSHOT, FakeEngine
from tests.server.conftest import Running, Web, within


async def test_events_are_those_of_the_pool(web: Web) -> None:
    async with httpx.AsyncClient(base_url=web.url) as client:
        expected = (await client.get("/v1/pool")).json()
        async with client.stream("GET", "/v1/pool/events?interval_ms=100") as stream:
            assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = stream.aiter_lines()
            seen = []
            while len(seen) < 3:
                line = await within(anext(lines))
                if line:
                    assert line.startswith("data: ")
                    seen.append(json.loads(line[6:]))
    assert seen == [expected] * 3


async def test_grpc_sends_the_same_numbers(running: Running) -> None:
    call = running.stub.WatchPool(pb.WatchPoolRequest(interval_ms=100))
    for _ in range(2):
        message = await within(call.read())
        assert (message.running, message.waiting) == (3, 5)
        assert dict(message.counters) == dict(SNAPSHOT.counters)
        for ours, theirs in zip(SNAPSHOT.tiers, message.tiers, strict=True):
            assert (theirs.name, theirs.total_pages, theirs.page_bytes) == (ours.name, ours.num_total, ours.page_bytes)
            assert {state.name: state.pages for state in theirs.states} == ours.pages
            assert sum(state.pages for state in theirs.states) == theirs.total_pages
    call.cancel()


@pytest.mark.parametrize("value", ["99", "60001", "-1", "1.5", "", "x", "9" * 400])
async def test_an_interval_out_of_bounds(client: httpx.AsyncClient, value: str) -> None:
    response = await client.get(f"/v1/pool/events?interval_ms={value}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "interval_ms")


async def test_a_grpc_interval_out_of_bounds(running: Running) -> None:
    for value in (0, 99, 60_001):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.WatchPool(pb.WatchPoolRequest(interval_ms=value)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_many_who_watch_cost_one_question(engine: FakeEngine, service: Service) -> None:
    first = await asyncio.gather(*(anext(service.pool_watch.snapshots(60, lambda: None)) for _ in range(20)))
    assert first == [SNAPSHOT] * 20 and len(engine.checks) == 1


async def test_head_is_answered_at_once(web: Web) -> None:
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await within(client.head("/v1/pool/events"))).status_code == 200
        assert (await within(client.get("/health"))).status_code == 200  # on the same connection


async def test_a_drain_ends_it(running: Running, web: Web) -> None:
    call = running.stub.WatchPool(pb.WatchPoolRequest(interval_ms=100))
    await within(call.read())
    async with httpx.AsyncClient(base_url=web.url) as client:
        async with client.stream("GET", "/v1/pool/events?interval_ms=100") as stream:
            lines = stream.aiter_lines()
            await within(anext(lines))
            running.service.drain()
            async for _ in lines:
                pass
        refused = await client.get("/v1/pool/events")
    assert refused.status_code == 503
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await within(call.read())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_refusal_of_the_engine_has_its_own_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.refusal = RequestError(ErrorKind.UNAVAILABLE, "gone")
    assert (await client.get("/v1/pool/events")).status_code == 503
