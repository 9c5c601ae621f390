"""GET /metrics where the engine gives no answer: a step that never ends, a server that shuts down."""

import asyncio
import threading
import time
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.service import Service
from tests.fakes import SNAPSHOT, FakeEngine
from tests.server import live
from tests.server.conftest import within


async def values(client: httpx.AsyncClient) -> dict[str, float]:
    """The samples without labels."""
    response = await within(client.get("/metrics"))
    assert response.status_code == 200
    families = text_string_to_metric_families(response.text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.fixture
def is_impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.metrics.PATIENCE_SECONDS", 0.01)


@pytest.mark.usefixtures("is_impatient")
async def test_a_step_that_does_not_end_is_seen(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await values(client))["quire_step_running_seconds"] == 0
    engine.step_ends.clear()
    engine.step_seconds = 45.5
    engine.snapshot = replace(SNAPSHOT, num_running=77)
    for _ in range(3):
        seen = await values(client)
        assert seen["quire_step_running_seconds"] == 45.5
        assert seen["quire_requests_running"] == SNAPSHOT.num_running  # of the last time
    assert len(engine.checks) == 2  # the engine is asked once more, not by each
    engine.step_ends.set()
    engine.step_seconds = 0.0
    assert (await values(client))["quire_requests_running"] == 77


@pytest.mark.usefixtures("is_impatient")
async def test_before_the_first_snapshot_there_is_what_the_server_knows(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.step_ends.clear()
    seen = await values(client)
    assert seen["quire_ready"] == 1 and seen["quire_queue_tokens"] == engine.num_waiting_tokens
    assert "quire_requests_running" not in seen
    engine.step_ends.set()
    assert "quire_requests_running" in await values(client)


async def test_a_server_that_shuts_down_is_not_ready(client: httpx.AsyncClient, service: Service) -> None:
    assert (await values(client))["quire_ready"] == 1
    service.drain()
    assert (await values(client))["quire_ready"] == 0


async def test_the_process_says_when_it_began(client: httpx.AsyncClient) -> None:
    seen = await values(client)
    assert time.time() - 86_400 < seen["process_start_time_seconds"] < time.time()
    assert seen["process_open_fds"] > 0 and seen["process_resident_memory_bytes"] > 2**20


@pytest.mark.usefixtures("is_impatient")
async def test_the_step_of_a_real_engine_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    async with live.serve() as server, server.client() as client:
        step = server.engine.core.step

        def held() -> None:
            assert gate.wait(60)
            step()

        monkeypatch.setattr(server.engine.core, "step", held)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        call = asyncio.create_task(client.post("/v1/completions", json=body))
        ends, longest = time.monotonic() + 30, 0.0
        try:
            while longest < 0.1:
                assert time.monotonic() < ends
                longest = (await values(client))["quire_step_running_seconds"]
        finally:
            gate.set()
        assert (await within(call, 30)).status_code == 200
        assert (await values(client))["quire_step_running_seconds"] == 0
