"""How requests end: reasons, counts, events, pages."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.errors import ErrorKind, RequestError
from engine.kv.shrink import Streaming
from engine.kv.sizing import smallest_pool
from engine.plan import StepPlan
from engine.request import Delta, Failed, Finished, FinishReason, Request, Usage
from engine.runner import StepOutput
from tests.helpers import Recorder, greedy, pool_of, random_prompt, run, tiny_core

PROMPT = random_prompt(3, 40)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    """One for all tests that leave it idle, as it was."""
    return tiny_core(max_model_len=128, kv_format="int4", batch_invariant=True)


@pytest.fixture(scope="module")
def reference(core: EngineCore) -> tuple[int, ...]:
    """The greedy continuation of PROMPT, 30 tokens."""
    return one(core, greedy("reference", PROMPT, 30)).token_ids


def one(core: EngineCore, request: Request) -> Recorder:
    (recorder,) = run(core, [request])
    assert_all_available(core)
    return recorder


def assert_all_available(core: EngineCore) -> None:
    core.scheduler.check()
    for pool in (core.scheduler.pools.cache.open, core.scheduler.pools.cache.sealed):
        assert (pool.num_held, pool.num_available) == (0, pool.num_total)


CACHED = 32  # tokens of PROMPT on pages that are in the tree once it has run


def finished(recorder: Recorder) -> Finished:
    assert isinstance(recorder.terminal, Finished)
    return recorder.terminal


def decoded(tokens: tuple[int, ...]) -> str:
    return bytes(byte_of(token) for token in tokens).decode(errors="replace")


def byte_of(token: int) -> int:
    """The tiny tokenizer's tokens are the 256 characters that stand for bytes, in the order of their code points."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return (printable + others)[token]


def place_of_first(tokens: tuple[int, ...], wanted: Callable[[int], bool]) -> int:
    """Index of the first token that `wanted` accepts and that did not occur before it, behind the first three."""
    return next(i for i, token in enumerate(tokens) if i >= 3 and wanted(token) and token not in tokens[:i])


def test_max_tokens(core: EngineCore, reference: tuple[int, ...]) -> None:
    for count in (1, 2, 30):
        recorder = one(core, greedy("r", PROMPT, count))
        assert finished(recorder) == Finished(FinishReason.LENGTH, Usage(40, CACHED, count))
        assert recorder.token_ids == reference[:count]
        assert recorder.text == decoded(reference[:count])
        assert len(recorder.events) == count + 1


def test_what_can_never_fit_is_refused_with_the_numbers(core: EngineCore) -> None:
    """The first page of a sequence is its sink page, in a slot; all others end in the sealed pool."""
    total = core.scheduler.pools.cache.sealed.num_total
    longest = 32 * (1 + total) - len(PROMPT)
    recorder = Recorder()
    core.add([greedy("too long", PROMPT, longest + 1)], [recorder])
    assert core.is_idle and isinstance(recorder.terminal, Failed)
    error = recorder.terminal.error
    assert (error.kind, error.param) == (ErrorKind.INVALID, "max_tokens")
    assert error.message.startswith(f"the request needs up to {total + 1} pages and the pool has {total}; lower max_")
    # Of a streaming one: the newest pages, one that was not dropped yet, and the pages of one chunk.
    endless = greedy("s", PROMPT, 10**6)
    core.add([replace(endless, shrink=Streaming(recent=total - 1))], [recorder := Recorder()])
    assert isinstance(recorder.terminal, Failed) and f"up to {total + 1} pages" in recorder.terminal.error.message
    core.add([replace(endless, shrink=Streaming(recent=total - 2))], [Recorder()])
    core.cancel("s")
    core.add([greedy("longest", PROMPT, longest)], [Recorder()])
    assert not core.is_idle
    core.cancel("longest")
    assert_all_available(core)


def test_a_fork_of_more_than_may_run_is_refused_once_for_each(core: EngineCore) -> None:
    recorders = [Recorder() for _ in range(9)]
    core.add([greedy(f"r{i}", PROMPT, 1) for i in range(9)], recorders)
    assert core.is_idle
    for recorder in recorders:
        assert isinstance(recorder.terminal, Failed)
        assert (recorder.terminal.error.kind, recorder.terminal.error.param) == (ErrorKind.INVALID, "n")
        assert "n is 9; this server runs at most 8 sequences" in recorder.terminal.error.message


def test_stop_token_ids(core: EngineCore, reference: tuple[int, ...]) -> None:
    place = place_of_first(reference, lambda token: True)
    stops = frozenset({reference[place], 255 - reference[0]} - {*reference[:place]})
    recorder = one(core, greedy("r", PROMPT, 30, stop_token_ids=stops))
    assert finished(recorder) == Finished(FinishReason.STOP, Usage(40, CACHED, place + 1), reference[place])
    assert recorder.token_ids == reference[: place + 1]
    assert recorder.text == decoded(reference[:place])


def test_eos_ends_and_ignore_eos_goes_on(reference: tuple[int, ...]) -> None:
    place = place_of_first(reference, lambda token: True)
    core = tiny_core(max_model_len=128, kv_format="int4", batch_invariant=True)
    core._eos_token_ids = frozenset({reference[place]})
    recorder = one(core, greedy("r", PROMPT, 30, ignore_eos=False))
    assert finished(recorder) == Finished(FinishReason.STOP, Usage(40, 0, place + 1))
    assert recorder.text == decoded(reference[:place])
    assert one(core, greedy("r", PROMPT, 30)).token_ids == reference


def test_a_stop_token_ends_though_eos_is_ignored(reference: tuple[int, ...]) -> None:
    place = place_of_first(reference, lambda token: True)
    core = tiny_core(max_model_len=128, kv_format="int4", batch_invariant=True)
    core._eos_token_ids = frozenset({reference[place]})
    recorder = one(core, greedy("r", PROMPT, 30, stop_token_ids=frozenset({reference[place]})))
    assert finished(recorder).matched_stop == reference[place]


def test_stop_strings_across_tokens(core: EngineCore, reference: tuple[int, ...]) -> None:
    """Every token is a byte, so a stop of two ASCII characters spans two tokens."""
    text = decoded(reference)
    starts = [i for i in range(1, len(text) - 1) if text[i : i + 2].isascii() and text.find(text[i : i + 2]) == i]
    assert starts
    for start in starts[:3]:
        stop = text[start : start + 2]
        recorder = one(core, greedy("r", PROMPT, 30, stop=("\u2603 never", stop)))
        terminal = finished(recorder)
        assert (terminal.reason, terminal.matched_stop) == (FinishReason.STOP, stop)
        assert recorder.text == text[:start]
        # Every token up to the one that completed the match counts.
        assert recorder.token_ids == reference[: terminal.usage.num_generated_tokens]
        assert decoded(recorder.token_ids).endswith(stop)


def test_text_held_for_a_stop_string_is_flushed_at_the_end(core: EngineCore, reference: tuple[int, ...]) -> None:
    text = decoded(reference[:10])
    recorder = one(core, greedy("r", PROMPT, 10, stop=(text[-1] + "\u2603",)))
    assert finished(recorder).reason is FinishReason.LENGTH
    assert recorder.text == text


def test_sampled_requests_repeat_and_do_not_depend_on_company(core: EngineCore) -> None:
    def batch() -> list[Request]:
        return [
            greedy(f"r{i}", random_prompt(i, 20 + 15 * i), 20, temperature=0.9, seed=i, top_p=0.95) for i in range(4)
        ]

    together = [recorder.token_ids for recorder in run(core, batch())]
    alone = [one(core, request).token_ids for request in batch()]
    assert together == alone
    assert len(set(together)) == 4


def test_cancel_while_waiting_prefilling_and_decoding_frees_at_once() -> None:
    core = tiny_core(max_model_len=512, max_num_seqs=2, max_step_tokens=34, kv_format="int8")
    requests = [greedy("d", PROMPT[:20], 99), greedy("p", random_prompt(0, 300), 9), greedy("w", PROMPT, 9)]
    recorders = [Recorder() for _ in requests]
    for request, recorder in zip(requests, recorders, strict=True):
        core.add([request], [recorder])
    core.step()
    core.step()
    running = {s.request.id: s for s in core.scheduler.running}
    assert running["d"].is_decoding and 0 < running["p"].num_computed_tokens < 300 and core.scheduler.num_waiting == 1
    held = [core.scheduler.pools.cache.sealed.num_available]
    for id in ("w", "p", "d"):
        core.cancel(id)
        core.scheduler.check()
        held.append(core.scheduler.pools.cache.sealed.num_available)
    assert core.is_idle and held[0] == held[1] < held[2]
    assert_all_available(core)
    generated = [len(recorder.token_ids) for recorder in recorders]
    assert [recorder.terminal for recorder in recorders] == [
        Finished(FinishReason.CANCELLED, Usage(len(request.prompt), 0, count))
        for request, count in zip(requests, generated, strict=True)
    ]
    assert generated[0] > 0 and generated[1:] == [0, 0]


def test_cancel_of_an_ended_or_unknown_request_is_ignored(core: EngineCore) -> None:
    recorder = one(core, greedy("r", PROMPT, 2))
    core.cancel("r")
    core.cancel("never there")
    assert len(recorder.events) == 3 and finished(recorder).reason is FinishReason.LENGTH
    assert_all_available(core)


def test_cancel_leaves_others_alone(core: EngineCore, reference: tuple[int, ...]) -> None:
    stays, goes = Recorder(), Recorder()
    core.add([greedy("goes", random_prompt(9, 50), 50)], [goes])
    core.add([greedy("stays", PROMPT, 30)], [stays])
    for _ in range(5):
        core.step()
    core.cancel("goes")
    while not core.is_idle:
        core.step()
    assert stays.token_ids == reference and finished(goes).reason is FinishReason.CANCELLED
    assert_all_available(core)


def test_a_preempted_request_returns_to_its_place_in_the_queue() -> None:
    """The pool holds one sequence of full length and max_num_seqs is 2, so the second is preempted; the third waits."""
    options = {"max_model_len": 128, "max_num_seqs": 2}
    layout = pool_of(tiny_core(**options)).layout
    memory = smallest_pool(layout, 2, 128).num_bytes
    core = tiny_core(**options, kv_memory=memory)
    ended: list[str] = []
    for id in ("first", "second", "third"):
        request = greedy(id, random_prompt(len(id), 60), 60)
        core.add([request], [lambda event, id=id: ended.append(id) if isinstance(event, Finished) else None])
    while not core.is_idle:
        core.step()
        core.scheduler.check()
    assert core.scheduler.num_preemptions > 0
    assert ended == ["first", "second", "third"]
    assert_all_available(core)


def test_fail_all_ends_every_request_once() -> None:
    core = tiny_core(max_num_seqs=1, max_step_tokens=64)
    recorders = [Recorder() for _ in range(3)]
    for index, recorder in enumerate(recorders):
        core.add([greedy(str(index), PROMPT, 9)], [recorder])
    core.step()
    core.step()
    error = RequestError(ErrorKind.UNAVAILABLE, "gone")
    core.fail_all(error)
    core.fail_all(error)
    assert [recorder.terminal for recorder in recorders] == [Failed(error)] * 3
    assert all(isinstance(event, Delta) for recorder in recorders for event in recorder.events[:-1])


def test_a_model_that_overflows_fails_the_request_and_no_other() -> None:
    core = tiny_core()
    expected = run(core, [greedy("alone", PROMPT, 5)])[0].token_ids
    sick, sound = Recorder(), Recorder()
    core.add([greedy("sick", PROMPT, 5)], [sick])
    core.add([greedy("sound", PROMPT, 5)], [sound])
    real = core.runner.run

    def run_with_a_sick_row(plan: StepPlan) -> StepOutput:
        output = real(plan)
        pairs = zip(plan.sampled, output.tokens, strict=True)
        return replace(output, tokens=[None if s.request.id == "sick" else token for s, token in pairs])

    core.runner.run = run_with_a_sick_row  # type: ignore[method-assign]
    while not core.is_idle:
        core.step()
        core.scheduler.check()
    assert isinstance(sick.terminal, Failed) and sick.terminal.error.kind is ErrorKind.INTERNAL
    assert sound.token_ids == expected
    assert_all_available(core)
