"""The engine's thread and its handles, over the tiny model: order, cancel, overload, stop, faults."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ErrorKind, RequestError
from engine.load import build_engine
from engine.request import Delta, Event, Failed, Finished, FinishReason
from tests.gate import Gate
from tests.helpers import TINY, RandomCheckpoint, byte_tokenizer, greedy, random_prompt, run, tiny_core
from tests.listener import Listener

PROMPT = random_prompt(3, 40)
Build = Callable[..., Engine]


@pytest.fixture
async def build() -> AsyncIterator[Build]:
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        config = EngineConfig(
            **{  # type: ignore[arg-type]
                "model": "tiny",
                "dtype": "float32",
                "device": "cpu",
                "kv_format": "int4",
                "page_tokens": 32,
                "max_num_seqs": 4,
                "max_step_tokens": 64,
                "kv_memory": 8 * 2**20,
                "max_model_len": 512,
                "batch_invariant": True,
            }
            | options
        )
        engines.append(build_engine(config, RandomCheckpoint(TINY), byte_tokenizer(), lambda done, total: None))
        return engines[-1]

    yield build
    for engine in engines:
        if isinstance(gate := engine.core.runner, Gate):
            gate.open()
        await asyncio.to_thread(engine.stop)


async def within(awaitable: Any, seconds: float = 20) -> Any:
    """Wait for something that must happen, and fail instead of hanging when it does not."""
    return await asyncio.wait_for(awaitable, seconds)


def num_held(engine: Engine) -> int:
    cache = engine.core.scheduler.pools.cache
    return cache.open.num_held + cache.sealed.num_held


async def test_events_come_in_order_and_equal_those_of_the_core(build: Build) -> None:
    engine = build()
    engine.start()
    requests = [greedy(f"r{i}", random_prompt(i, 10 + 30 * i), 20) for i in range(6)]  # more than run at once
    results = await within(asyncio.gather(*(Listener(engine, request).events() for request in requests)))
    core = tiny_core(kv_format="int4", max_model_len=512, batch_invariant=True)
    for request, events in zip(requests, results, strict=True):
        (recorder,) = run(core, [request])
        assert events == recorder.events
        assert all(isinstance(event, Delta) for event in events[:-1])
        assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.LENGTH
    assert num_held(engine) == 0


async def test_requests_of_two_event_loops(build: Build) -> None:
    engine = build()
    engine.start()
    request = greedy("other loop", PROMPT, 5)

    async def events(id: str) -> list[Event]:
        return await Listener(engine, greedy(id, PROMPT, 5)).events()

    other = asyncio.to_thread(lambda: asyncio.run(events(request.id)))
    theirs, ours = await within(asyncio.gather(other, events("this loop")))
    assert theirs[:-1] == ours[:-1]
    # one of them computes the full page of the prompt, whichever comes first, and the other finds it
    assert {(type(end), end.usage.num_cached_tokens) for end in (theirs[-1], ours[-1])} == {
        (Finished, 0),
        (Finished, 32),
    }


async def test_cancel_frees_within_a_step(build: Build) -> None:
    engine = build()
    gate = Gate.before(engine)
    engine.start()
    handle = Listener(engine, greedy("r", PROMPT, 400))
    await gate.wait_for_step()
    gate.let_through()
    await gate.wait_for_step()  # the first decode row
    assert num_held(engine) > 0
    handle.cancel()
    handle.cancel()
    gate.let_through()
    # Nothing more may come to the gate: the step that ran is the last.
    events = await within(handle.events())
    assert [type(event) for event in events] == [Delta, Delta, Finished]
    assert isinstance(events[-1], Finished) and events[-1].reason is FinishReason.CANCELLED
    assert num_held(engine) == 0 and engine.core.is_idle
    handle.cancel()  # an ended request
    gate.open()
    assert len(await within(Listener(engine, greedy("next", PROMPT, 3)).events())) == 4


async def test_the_time_of_a_step_is_seen_while_it_runs(build: Build) -> None:
    engine = build()
    gate = Gate.before(engine)
    engine.start()
    assert engine.step_seconds == 0
    listener = Listener(engine, greedy("r", PROMPT, 2))
    await gate.wait_for_step()
    first = engine.step_seconds
    await asyncio.sleep(0.01)
    assert 0 < first < first + 0.01 <= engine.step_seconds
    released = time.monotonic()
    gate.let_through()
    await gate.wait_for_step()  # another step, timed anew
    assert engine.step_seconds <= time.monotonic() - released
    gate.open()
    await within(listener.events())
    for _ in range(1000):  # the last event comes from within a step
        if engine.step_seconds == 0:
            break
        await asyncio.sleep(0.001)
    assert engine.step_seconds == 0


async def test_prompts_that_wait_are_bounded_in_tokens(build: Build) -> None:
    engine = build(max_num_seqs=1, max_queued_tokens=100)
    gate = Gate.before(engine)
    engine.start()
    first = Listener(engine, greedy("first", PROMPT, 2))
    await gate.wait_for_step()
    long = Listener(engine, greedy("long", random_prompt(1, 200), 2))  # alone it may wait, else it could never run
    assert engine.num_waiting_tokens == 200
    with pytest.raises(RequestError) as caught:
        Listener(engine, greedy("too many", PROMPT, 2))
    assert (caught.value.kind, caught.value.code) == (ErrorKind.OVERLOADED, "queue_full")
    gate.open()
    await within(asyncio.gather(first.events(), long.events()))
    assert engine.num_waiting_tokens == 0
    await within(Listener(engine, greedy("later", PROMPT, 2)).events())


async def test_a_full_queue_refuses(build: Build) -> None:
    engine = build(max_num_seqs=1, max_queued_requests=2, max_step_tokens=64)
    gate = Gate.before(engine)
    engine.start()
    first = Listener(engine, greedy("first", PROMPT, 2))
    await gate.wait_for_step()
    queued = [Listener(engine, greedy(f"queued {i}", PROMPT, 2)) for i in range(2)]
    with pytest.raises(RequestError) as caught:
        Listener(engine, greedy("too many", PROMPT, 2))
    assert (caught.value.kind, caught.value.code) == (ErrorKind.OVERLOADED, "queue_full")
    assert "2 requests are waiting" in caught.value.message
    with pytest.raises(RequestError, match="2 requests are waiting"):
        engine.check_room(1)
    gate.open()
    results = await within(asyncio.gather(*(handle.events() for handle in (first, *queued))))
    assert all(isinstance(events[-1], Finished) for events in results)
    await within(Listener(engine, greedy("later", PROMPT, 2)).events())


async def test_cancels_do_not_count_as_waiting_requests(build: Build) -> None:
    """A front end cancels every request that it is done with, ended or not."""
    engine = build(max_queued_requests=1)
    gate = Gate.before(engine)
    engine.start()
    running = Listener(engine, greedy("running", PROMPT, 2))
    await gate.wait_for_step()
    for _ in range(5):
        running.cancel()
    assert engine.num_waiting == 0
    queued = Listener(engine, greedy("queued", PROMPT, 2))
    gate.open()
    results = await within(asyncio.gather(running.events(), queued.events()))
    assert [events[-1].reason for events in results] == [FinishReason.CANCELLED, FinishReason.LENGTH]


async def test_stop_fails_what_runs_and_what_waits(build: Build) -> None:
    engine = build(max_num_seqs=1)
    gate = Gate.before(engine)
    engine.start()
    handles = [Listener(engine, greedy(f"r{i}", PROMPT, 400)) for i in range(3)]
    await gate.wait_for_step()
    late = Listener(engine, greedy("late", PROMPT, 400))
    stopping = asyncio.create_task(asyncio.to_thread(engine.stop))
    gate.open()
    results = await within(asyncio.gather(*(handle.events() for handle in (*handles, late))))
    await within(stopping)
    for events in results:
        terminal = events[-1]
        assert isinstance(terminal, Failed) and terminal.error.kind is ErrorKind.UNAVAILABLE
        assert sum(not isinstance(event, Delta) for event in events) == 1
    assert not engine.is_ready
    await expect_unavailable(engine)


@pytest.mark.parametrize("kind", [RuntimeError, GeneratorExit])
async def test_a_fault_in_a_step_fails_every_request_and_closes(
    build: Build, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    engine = build(max_num_seqs=2)
    gate = Gate.before(engine)
    engine.start()
    assert engine.is_ready
    handles = [Listener(engine, greedy(f"r{i}", PROMPT, 50)) for i in range(4)]
    await gate.wait_for_step()
    gate.let_through()
    await gate.wait_for_step()
    gate.error = kind("device lost: canary-1847")
    in_inbox = Listener(engine, greedy("in the inbox", PROMPT, 50))
    gate.open()
    results = await within(asyncio.gather(*(handle.events() for handle in (*handles, in_inbox))))
    for events in results:
        terminal = events[-1]
        assert isinstance(terminal, Failed) and terminal.error.kind is ErrorKind.UNAVAILABLE
        assert "canary" not in terminal.error.message
    assert "canary-1847" in caplog.text  # for the operator
    assert not engine.is_ready
    await expect_unavailable(engine)
    await within(asyncio.to_thread(engine.stop))


async def expect_unavailable(engine: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        Listener(engine, greedy("after", PROMPT, 2))
    assert caught.value.kind is ErrorKind.UNAVAILABLE


async def test_submitting_before_start_is_refused(build: Build) -> None:
    engine = build()
    assert not engine.is_ready
    await expect_unavailable(engine)


async def test_a_listener_whose_loop_has_closed_harms_nobody(build: Build) -> None:
    engine = build()
    gate = Gate.before(engine)
    engine.start()

    async def submit_and_leave() -> None:
        Listener(engine, greedy("left behind", PROMPT, 3))

    await asyncio.to_thread(lambda: asyncio.run(submit_and_leave()))
    await gate.wait_for_step()
    gate.open()
    events = await within(Listener(engine, greedy("here", PROMPT, 3)).events())
    assert isinstance(events[-1], Finished) and engine.is_ready
