"""GET /v1/pool and GET /metrics: the numbers of one snapshot, to be read by people and by Prometheus."""

import asyncio
import itertools
import re
from dataclasses import fields, replace
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ErrorKind, RequestError
from engine.kv.stats import SECONDS, Histogram, PoolSnapshot, PoolStats, Reclaimed, TierSnapshot
from tests.fakes import SNAPSHOT, FakeEngine
from tests.server.conftest import within

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,*/*;q=0.1"
)
FRESH = PoolSnapshot(
    tiers=(TierSnapshot("sealed", 8, 10, {"free": 8, "cached": 0}, {}),),
    num_running=0,
    num_waiting=0,
    num_cached_nodes=0,
    counters={field.name: 0 for field in fields(PoolStats) if field.name.startswith("num_")},
    reclaimed={},
    histograms={name: Histogram().snapshot() for name in ("lifetime", "idle", "reuse_gap")},
    shared_prefixes=(),
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


SERVER = re.compile(
    r"process_|quire_(build|ready|step|queue|request_|requests_[afr][a-z]+ed|prompt|generation|time|inter)"
)


def samples_of(families: Any) -> Samples:
    """Name and labels to value of what concerns the pool; each may occur once."""
    families = [family for family in families if not SERVER.match(family.name)]
    found = [(s.name, frozenset(s.labels.items()), s.value) for family in families for s in family.samples]
    samples = {(name, labels): value for name, labels, value in found}
    assert len(samples) == len(found)
    return samples


async def pool_of(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.get("/v1/pool")
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    body: dict[str, Any] = response.json()
    return body


async def metrics_of(client: httpx.AsyncClient) -> Samples:
    response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return samples_of(text_string_to_metric_families(response.text))


async def test_states_sum_to_the_total(client: httpx.AsyncClient) -> None:
    pool = await pool_of(client)
    for tier in pool["tiers"].values():
        for unit in tier["total"]:
            assert sum(state[unit] for state in tier["states"].values()) == tier["total"][unit]
    sealed = pool["tiers"]["sealed"]
    assert sealed["total"] == {"pages": 100, "tokens": 3840, "bytes": 100_000}
    assert sealed["states"]["held"] == {"pages": 35, "tokens": 2240, "bytes": 35_000}
    assert sealed["states"]["free"] == {"pages": 40, "tokens": 0, "bytes": 40_000}
    assert pool["tiers"]["open"]["states"]["open"] == {"pages": 11, "tokens": 333, "bytes": 44_000}
    assert pool["tiers"]["host"]["states"]["cached"] == {"records": 1, "tokens": 64, "bytes": 1_000}


async def test_a_page_that_no_state_has_shows(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The total is what the pool holds, not a sum of what was found."""
    lossy = replace(SNAPSHOT.tiers[0], pages={"free": 39, "held": 35, "cached": 25})
    engine.snapshot = replace(SNAPSHOT, tiers=(lossy,))
    sealed = (await pool_of(client))["tiers"]["sealed"]
    assert sealed["total"]["pages"] - sum(state["pages"] for state in sealed["states"].values()) == 1


async def test_the_rest_of_the_pool(client: httpx.AsyncClient) -> None:
    pool = await pool_of(client)
    del pool["tiers"]
    histograms = pool.pop("histograms")
    assert pool == {
        "requests": {"running": 3, "waiting": 5},
        "prefix_cache": {
            "nodes": 27, "query_tokens": 8000, "hit_tokens": 2000, "host_hit_tokens": 130, "hit_rate": 0.25,
        },
        "pages": {"sealed": 131, "adopted": 132, "dropped": 133, "saved": 134, "restored": 135},
        "reclaimed_pages": {
            "sealed_needed": 12, "slot_needed": 13, "host_needed": 0, "flushed": 0, "detached": 0,
        },
        "preemptions": {"total": 136, "swaps": 137, "lost_tokens": 138},
        "shared_prefixes": [{"tokens": 640, "sequences": 4}, {"tokens": 64, "sequences": 9}],
    }  # fmt: skip
    assert list(histograms) == ["bounds_seconds", "lifetime", "idle", "reuse_gap"]
    assert histograms["bounds_seconds"] == list(SECONDS)
    assert histograms["idle"] == {"count": sum(range(30, 42)), "sum_seconds": 2.5, "counts": list(range(30, 42))}


async def test_the_pool_can_be_read_without_a_tool(client: httpx.AsyncClient) -> None:
    text = (await client.get("/v1/pool")).text
    assert re.search(r'^ +"cached": \{"pages":25,"tokens":1600,"bytes":25000\}$', text, re.MULTILINE)
    assert text.endswith("}\n") and max(map(len, text.splitlines())) < 120


async def test_a_fresh_pool(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.snapshot = FRESH
    pool = await pool_of(client)
    assert pool["prefix_cache"]["hit_rate"] is None
    assert pool["shared_prefixes"] == []
    assert set(pool["reclaimed_pages"].values()) == {0}
    samples = await metrics_of(client)
    assert {name for name, _ in samples} == {name for name, _ in samples_of_snapshot()}
    assert {number for (name, _), number in samples.items() if not name.startswith("quire_pool")} == {0}


@pytest.mark.parametrize(
    ("query", "asked"), [("", False), ("?check=false", False), ("?check=true", True), ("?other=1", False)]
)
async def test_check(client: httpx.AsyncClient, engine: FakeEngine, query: str, asked: bool) -> None:
    response = await client.get(f"/v1/pool{query}")
    assert response.status_code == 200
    assert response.json().get("check") == ("ok" if asked else None)
    assert engine.checks == [asked]


@pytest.mark.parametrize("value", ["", "yes", "1", "TRUE", "canary-7421", "true%20"])
async def test_another_value_of_check_is_refused(client: httpx.AsyncClient, engine: FakeEngine, value: str) -> None:
    response = await client.get(f"/v1/pool?check={value}")
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": "check must be true or false", "type": "invalid_request_error", "param": "check",
        "code": "invalid_value",
    }  # fmt: skip
    assert engine.checks == []


@pytest.mark.parametrize("route", ["/v1/pool?check=true", "/metrics"])
async def test_refusals_of_the_engine_keep_their_status(
    client: httpx.AsyncClient, engine: FakeEngine, route: str
) -> None:
    for kind, status in ((ErrorKind.INTERNAL, 500), (ErrorKind.UNAVAILABLE, 503)):
        engine.refusal = RequestError(kind, "page 7 is held twice")
        response = await client.get(route)
        assert (response.status_code, response.json()["error"]["message"]) == (status, "page 7 is held twice")


@pytest.mark.parametrize("route", ["/v1/pool", "/metrics"])
async def test_a_long_step_holds_up_nobody_else(client: httpx.AsyncClient, engine: FakeEngine, route: str) -> None:
    engine.step_ends.clear()
    waiting = asyncio.create_task(client.get(route))
    while not engine.checks:
        assert not waiting.done()
        await asyncio.sleep(0)
    assert (await within(client.get("/health/live"))).status_code == 200
    assert not waiting.done()
    engine.step_ends.set()
    assert (await within(waiting)).status_code == 200


def samples_of_snapshot() -> Samples:
    """What Prometheus should see of the fake engine's snapshot, written out."""
    plain = {
        "requests_running": 3, "requests_waiting": 5, "prefix_nodes": 27, "longest_shared_prefix_tokens": 640,
        "prefix_query_tokens_total": 8000, "prefix_hit_tokens_total": 2000, "prefix_host_hit_tokens_total": 130,
        "pages_sealed_total": 131, "pages_adopted_total": 132, "pages_dropped_total": 133, "pages_saved_total": 134,
        "pages_restored_total": 135, "preemptions_total": 136, "swaps_total": 137,
        "preempted_lost_tokens_total": 138,
    }  # fmt: skip
    samples: Samples = {(f"quire_{name}", frozenset()): float(number) for name, number in plain.items()}
    reclaimed = {"sealed_needed": 12, "slot_needed": 13, "host_needed": 0, "flushed": 0, "detached": 0}
    assert set(reclaimed) == {reason.value for reason in Reclaimed}
    for reason, number in reclaimed.items():
        samples["quire_pages_reclaimed_total", frozenset({("reason", reason)})] = number
    for tier, state, pages, tokens, size in [
        ("sealed", "free", 40, 0, 40_000), ("sealed", "held", 35, 2240, 35_000),
        ("sealed", "cached", 25, 1600, 25_000),
        ("open", "free", 7, 0, 28_000), ("open", "open", 11, 333, 44_000), ("open", "sink", 2, 128, 8_000),
        ("host", "free", 49, 0, 49_000), ("host", "cached", 1, 64, 1_000),
    ]:  # fmt: skip
        labels = frozenset({("tier", tier), ("state", state)})
        samples |= {("quire_pool_pages", labels): pages, ("quire_pool_tokens", labels): tokens,
                    ("quire_pool_bytes", labels): size}  # fmt: skip
    for name, first, total in (("page_lifetime", 0, 1.5), ("page_idle", 30, 2.5), ("page_reuse_gap", 60, 3.5)):
        counts = list(itertools.accumulate(range(first, first + 12)))
        for bound, count in zip([*map(str, SECONDS), "+Inf"], counts, strict=True):
            samples[f"quire_{name}_seconds_bucket", frozenset({("le", bound)})] = count
        samples[f"quire_{name}_seconds_count", frozenset()] = counts[-1]
        samples[f"quire_{name}_seconds_sum", frozenset()] = total
    return samples


async def test_metrics_are_the_snapshot(client: httpx.AsyncClient) -> None:
    assert await metrics_of(client) == samples_of_snapshot()


async def test_openmetrics_where_the_client_takes_it(client: httpx.AsyncClient) -> None:
    response = await client.get("/metrics", headers={"accept": PROMETHEUS_ACCEPT})
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert samples_of(openmetrics.text_string_to_metric_families(response.text)) == samples_of_snapshot()


@pytest.mark.parametrize(
    "accept", ["*/*", "text/plain;version=abc", "application/openmetrics-text;version=abc", "é;;="]
)
async def test_no_accept_header_makes_a_scrape_fail(client: httpx.AsyncClient, accept: str) -> None:
    response = await client.get("/metrics", headers={"accept": accept.encode()})
    assert response.status_code == 200
    assert response.text.count("# HELP quire_") == response.text.count("# TYPE quire_") == 37


async def test_names_follow_the_rules_of_prometheus(client: httpx.AsyncClient) -> None:
    families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    for family in families:
        assert re.fullmatch(r"(quire|process)(_[a-z]+)+", family.name)
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter", "histogram")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


async def test_every_counter_of_the_pool_is_shown(client: httpx.AsyncClient) -> None:
    assert set(SNAPSHOT.counters) == set(FRESH.counters)
    numbers = set(SNAPSHOT.counters.values())
    assert len(numbers) == len(SNAPSHOT.counters)
    assert numbers <= set(map(int, re.findall(r"(?<=:)\d+", (await client.get("/v1/pool")).text)))
    assert numbers <= set((await metrics_of(client)).values())


async def test_pool_and_metrics_agree(client: httpx.AsyncClient) -> None:
    pool, samples = await pool_of(client), await metrics_of(client)
    for name, tier in pool["tiers"].items():
        for state, amount in tier["states"].items():
            for unit, number in amount.items():
                labels = frozenset({("tier", name), ("state", state)})
                assert samples[f"quire_pool_{'pages' if unit == 'records' else unit}", labels] == number
