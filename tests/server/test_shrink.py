"""`kv_shrink` and `priority`: what reaches the engine, and how long an output may be."""

from dataclasses import replace
from typing import Any

import httpx
import pytest

from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from tests.fakes import FakeEngine
from tests.server.wire import BODIES, CHAT, COMPLETION

CONTEXT = 128
STREAMING = {"kv_shrink": "streaming:recent=2"}


async def shrink_of(client: httpx.AsyncClient, engine: FakeEngine, route: str, fields: dict[str, Any]) -> Shrink | None:
    assert (await client.post(route, json={**BODIES[route], **fields})).status_code == 200
    return engine.requests[-1].shrink


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("default", [None, Streaming(recent=3), SnapKV()])
async def test_a_request_overrides_the_server(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, default: Shrink | None
) -> None:
    engine.info = replace(engine.info, shrink=default, has_host_memory=True)
    assert await shrink_of(client, engine, route, {}) == default
    assert await shrink_of(client, engine, route, {"kv_shrink": None}) == default
    assert await shrink_of(client, engine, route, {"kv_shrink": "none"}) is None
    assert await shrink_of(client, engine, route, {"kv_shrink": "streaming:recent=7"}) == Streaming(recent=7)
    given = {"kv_shrink": "h2o:heavy=4,recent=2"}
    assert await shrink_of(client, engine, route, given) == HeavyHitters(heavy=4, recent=2)


@pytest.mark.parametrize("route", BODIES)
async def test_a_server_that_cannot_drop_pages_says_why(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    engine.info = replace(engine.info, why_none_is_dropped="a server with a window drops no pages")
    response = await client.post(route, json={**BODIES[route], **STREAMING})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "kv_shrink" and "a server with a window drops no pages" in error["message"]
    assert await shrink_of(client, engine, route, {"kv_shrink": "none"}) is None


async def test_priority(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for given in (None, 0, -(2**31), 2**31 - 1):
        assert (await client.post("/v1/completions", json={**COMPLETION, "priority": given})).status_code == 200
    await client.post("/v1/chat/completions", json=CHAT)
    assert [request.priority for request in engine.requests] == [0, 0, -(2**31), 2**31 - 1, 0]


@pytest.mark.parametrize("is_default", [True, False])
async def test_streaming_may_outgrow_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, is_default: bool
) -> None:
    if is_default:
        engine.info = replace(engine.info, shrink=Streaming(recent=2))
    fields = {} if is_default else STREAMING
    for route, body in BODIES.items():
        response = await client.post(route, json={**body, **fields, "max_tokens": 10**6})
        assert response.status_code == 200
        assert engine.requests[-1].sampling.max_tokens == 10**6


async def test_without_max_tokens_streaming_ends_where_any_request_does(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    bodies = [COMPLETION, {**COMPLETION, "prompt": [1] * 120}, CHAT]
    for body in bodies:
        await client.post("/v1/chat/completions" if body is CHAT else "/v1/completions", json={**body, **STREAMING})
    chat_prompt = len(engine.requests[2].prompt)
    assert [request.sampling.max_tokens for request in engine.requests] == [16, 8, CONTEXT - chat_prompt]


async def test_the_context_still_bounds_the_prompt(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {**COMPLETION, **STREAMING, "prompt": [1] * CONTEXT, "max_tokens": 10**6}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (await client.post("/v1/completions", json={**body, "prompt": [1] * (CONTEXT - 1)})).status_code == 200


@pytest.mark.parametrize("given", ["none", "h2o", "snapkv"])
async def test_other_policies_keep_to_the_context(client: httpx.AsyncClient, engine: FakeEngine, given: str) -> None:
    engine.info = replace(engine.info, shrink=Streaming(recent=2), has_host_memory=True)
    response = await client.post("/v1/completions", json={**COMPLETION, "kv_shrink": given, "max_tokens": 126})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert engine.requests == []
