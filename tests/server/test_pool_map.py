"""GET /v1/pool/map, and the same within events: the numbers of one map, and what watching it costs the engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.errors import ErrorKind, RequestError
from server.service import Service
from server.telemetry import Telemetry
from tests.fakes import FakeEngine
from tests.server.conftest import Web, within
from tests.server.wire import COMPLETION


async def map_of(client: httpx.AsyncClient, **query: str) -> dict[str, Any]:
    response = await client.get("/v1/pool/map", params=query)
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    found: dict[str, Any] = response.json()
    return found


async def test_its_numbers(client: httpx.AsyncClient) -> None:
    told = await map_of(client)
    assert (told["seconds"], told["page_tokens"], told["running"]) == (1000.5, 64, 300)
    assert told["sealed"] == {"pages": 5, "pages_per_cell": 1, "cells": ".0193"}
    assert told["open"] == {"pages": 4, "pages_per_cell": 1, "cells": ".so0"}
    assert told["tree"]["pages"] == 77 and told["tree"]["roots"] == [{"root": 2, "children": 4}]
    assert told["tree"]["runs"][0] == {
        "id": "open-1", "parent": None, "root": 2, "state": "pool", "pages": 3, "tokens": 192, "sequences": 12,
        "hits": 7, "idle_seconds": 1.2, "children": 2, "cut": False,
    }  # fmt: skip
    assert [(run["parent"], run["state"], run["cut"]) for run in told["tree"]["runs"][1:]] == [
        ("open-1", "pool", True), ("open-1", "host", False),
    ]  # fmt: skip
    assert told["requests"] == [
        {"id": "chatcmpl-1", "prompt_tokens": 10, "cached_tokens": 4, "generated_tokens": 3, "pages": 3,
         "phase": "decode"},
        {"id": "cmpl-2", "prompt_tokens": 900, "cached_tokens": 0, "generated_tokens": 0, "pages": 1,
         "phase": "prefill"},
    ]  # fmt: skip
    # A slot of 64 tokens takes 4000 bytes in float32, so 640 tokens take 10 times that in 32 bit.
    assert told["memory"] == {
        "tokens": 640, "bytes": 9000, "open_bytes": 8000, "open_bits": 32, "bytes_in_16_bit": 20_000
    }  # fmt: skip
    assert told["selected"] is None


async def test_the_pages_of_one_request(client: httpx.AsyncClient) -> None:
    assert (await map_of(client, request="chatcmpl-1"))["selected"] == {
        "id": "chatcmpl-1", "open": [1, 2], "sealed": [3]
    }  # fmt: skip
    assert (await map_of(client, request="gone"))["selected"] is None


@pytest.mark.parametrize("value", ["", "yes", "1", "TRUE"])
async def test_a_map_that_is_neither_true_nor_false(client: httpx.AsyncClient, value: str) -> None:
    response = await client.get(f"/v1/pool/events?map={value}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "map")


@pytest.mark.parametrize("path", ["/v1/pool/map?", "/v1/pool/events?map=true&"])
async def test_a_request_that_no_server_would_name(client: httpx.AsyncClient, path: str) -> None:
    response = await client.get(f"{path}request={'x' * 257}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request")


async def test_previews_only_where_the_operator_wants_them(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    assert "preview" not in json.dumps(await map_of(client))
    shows = Service(engine, shows_previews=True)  # type: ignore[arg-type]
    runs = json.loads(await shows.map_watch.json(None))["tree"]["runs"]
    assert [run["preview"] for run in runs] == ["Dear <user> of mine, how do you do and m", "hi", "ho"]
    await shows.dialect.close()


async def test_events_with_and_without_it(web: Web) -> None:
    async with httpx.AsyncClient(base_url=web.url) as client:
        pool = (await client.get("/v1/pool")).json()
        expected = {**pool, "map": await map_of(client, request="cmpl-2")}
        assert await first_event(client, "map=true&request=cmpl-2") == expected
        assert await first_event(client, "map=false") == await first_event(client, "interval_ms=100") == pool


async def first_event(client: httpx.AsyncClient, query: str) -> Any:
    async with client.stream("GET", f"/v1/pool/events?{query}") as stream:
        lines = stream.aiter_lines()
        line = await within(anext(lines))
        assert line.startswith("data: ") and await within(anext(lines)) == ""
        return json.loads(line[6:])


async def test_many_who_watch_get_one_map(engine: FakeEngine, service: Service) -> None:
    maps = await asyncio.gather(*(service.map_watch.json(f"{n}") for n in range(20)))
    assert len(set(maps)) == 1 and engine.num_maps == 1
    await service.map_watch.json("cmpl-2")
    assert engine.num_maps == 1


async def test_a_map_is_not_older_than_two_seconds(web: Web) -> None:
    """Two viewers at ten events a second: at most a map in two seconds, whichever moment it is asked for."""
    loop = asyncio.get_running_loop()

    async def watch(client: httpx.AsyncClient) -> int:
        seen, until = set(), loop.time() + 4.5
        async with client.stream("GET", "/v1/pool/events?map=true&interval_ms=100") as stream:
            async for line in stream.aiter_lines():
                if line:
                    seen.add(json.loads(line[6:])["map"]["counters"]["generated_tokens"])
                web.service.telemetry.hear_token(0.1, 0.0)
                if loop.time() > until:
                    break
        return len(seen)

    began = loop.time()
    async with httpx.AsyncClient(base_url=web.url) as client:
        num_seen = await within(asyncio.gather(watch(client), watch(client)), 30)
    assert min(num_seen) >= 2 and max(num_seen) <= web.engine.num_maps <= 1 + (loop.time() - began) / 2


async def test_nobody_watches(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for path in ("/v1/pool", "/metrics", "/"):
        assert (await client.get(path)).status_code == 200
    assert engine.num_maps == 0


async def test_refusals_have_their_own_status(engine: FakeEngine, service: Service, client: httpx.AsyncClient) -> None:
    engine.refusal = RequestError(ErrorKind.UNAVAILABLE, "gone")
    assert (await client.get("/v1/pool/map")).status_code == 503
    assert (await client.get("/v1/pool/events?map=true")).status_code == 503


async def test_totals_of_what_was_generated(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        usage = (await client.post("/v1/completions", json=COMPLETION)).json()["usage"]
    counters = (await map_of(client))["counters"]
    assert counters["prompt_tokens"] == 3 * usage["prompt_tokens"] > 0
    assert counters["generated_tokens"] == 12  # a delta each; the script of the fake has four
    assert counters["first_tokens"] == 3 and counters["first_token_seconds"] > 0
    assert set(Telemetry().totals().values()) == {0}
