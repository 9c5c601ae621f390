"""Answers that a grammar holds: small grammars written here, in all company, and what happens where one breaks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine.core import EngineCore
from engine.errors import ErrorKind
from engine.kv.sizing import smallest_pool
from engine.request import Event, Failed, Finished, FinishReason, Request
from tests.helpers import Recorder, greedy, pool_of, random_prompt, run, tiny_core

PROMPT = random_prompt(3, 40)
DIGITS = [token for token in range(256) if chr(token + 33) in "0123456789"]  # of the tiny tokenizer: 0 is "!"


def token_of(char: str) -> int:
    return ord(char) - 33


def allow(words: memoryview, tokens: list[int]) -> None:
    bits = np.asarray(words).view(np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)


class Digits:
    """Digits for ever."""

    is_complete = False

    def start(self) -> "Digits":
        return self

    def fill_mask(self, words: memoryview) -> None:
        allow(words, DIGITS)

    def accept(self, token: int) -> None:
        assert token in DIGITS


class _Spelling:
    def __init__(self, text: str, after: Callable[[int], None]):
        self._left = [token_of(char) for char in text]
        self._num_taken = 0
        self._after = after

    def fill_mask(self, words: memoryview) -> None:
        self._after(self._num_taken)
        allow(words, self._left[:1])

    def accept(self, token: int) -> None:
        assert token == self._left.pop(0)
        self._num_taken += 1

    @property
    def is_complete(self) -> bool:
        return not self._left


@dataclass(frozen=True)
class Exactly:
    """One text. `after` is called with the number of tokens taken whenever the next is asked for."""

    text: str
    after: Callable[[int], None] = lambda count: None

    def start(self) -> _Spelling:
        return _Spelling(self.text, self.after)


@dataclass(frozen=True)
class Broken:
    """Digits, until `method` raises."""

    method: str

    def start(self) -> "Broken":
        self._raise("start")
        return self

    def fill_mask(self, words: memoryview) -> None:
        self._raise("fill_mask")
        allow(words, DIGITS)

    def accept(self, token: int) -> None:
        self._raise("accept")

    @property
    def is_complete(self) -> bool:
        self._raise("is_complete")
        return False

    def _raise(self, name: str) -> None:
        if name == self.method:
            raise ValueError("the client's own words")


def asking(request: Request, grammar: object) -> Request:
    return replace(request, grammar=grammar)


def test_only_digits() -> None:
    greedily = asking(greedy("g", PROMPT, 30), Digits())
    drawn = [asking(greedy(str(i), PROMPT, 30, temperature=1.5, seed=i, top_p=0.9), Digits()) for i in range(3)]
    core = tiny_core()
    recorders = run(core, [greedily, *drawn])
    assert all(len(recorder.text) == 30 and set(recorder.text) <= set("0123456789") for recorder in recorders)
    assert len({recorder.text for recorder in recorders}) == 4
    for recorder in recorders:
        assert isinstance(recorder.terminal, Finished) and recorder.terminal.reason is FinishReason.LENGTH


def test_greedy_takes_the_likeliest_of_those_allowed() -> None:
    """Logprobs are of the raw logits, so that the likeliest of all are told too."""
    core = tiny_core()
    (recorder,) = run(core, [asking(greedy("g", PROMPT, 20, num_logprobs=256), Digits())])
    for delta in recorder.events[:-1]:
        (one,) = delta.logprobs  # type: ignore[union-attr]
        assert one.token_id == next(token for token, _ in one.top if token in DIGITS)
        assert dict(one.top)[one.token_id] == one.logprob
        assert sum(np.exp(value) for _, value in one.top) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("min_tokens", [0, 20])
def test_a_complete_answer_ends(min_tokens: int) -> None:
    """Nothing may follow, so it ends though `min_tokens` wants more."""
    (recorder,) = run(tiny_core(), [asking(greedy("r", PROMPT, 30, min_tokens=min_tokens), Exactly("abc"))])
    assert recorder.text == "abc"
    terminal = recorder.terminal
    assert isinstance(terminal, Finished) and terminal.usage.num_generated_tokens == 3
    assert (terminal.reason, terminal.matched_stop) == (FinishReason.STOP, None)


class Recording(Digits):
    def __init__(self) -> None:
        self.taken: list[int] = []

    def accept(self, token: int) -> None:
        self.taken.append(token)


def test_an_end_of_sequence_that_is_allowed_ends_and_is_not_handed_on() -> None:
    core, grammar = tiny_core(), Recording()
    core._eos_token_ids = frozenset({DIGITS[4]})
    (recorder,) = run(core, [asking(greedy("r", PROMPT, 200, temperature=1.0, seed=1, ignore_eos=False), grammar)])
    assert isinstance(recorder.terminal, Finished) and recorder.terminal.reason is FinishReason.STOP
    assert recorder.token_ids == (*grammar.taken, DIGITS[4]) and set(grammar.taken) <= set(DIGITS) - {DIGITS[4]}


def test_siblings_have_a_state_each() -> None:
    core, recorders = tiny_core(), [Recorder() for _ in range(3)]
    core.add([asking(greedy(str(index), PROMPT, 30), Exactly("abcdef"[: 2 + index])) for index in range(3)], recorders)
    finish(core)
    assert [recorder.text for recorder in recorders] == ["ab", "abc", "abcd"]


def finish(core: EngineCore) -> None:
    while not core.is_idle:
        core.step()
        core.scheduler.check()


def test_a_preempted_request_keeps_its_place_in_the_grammar() -> None:
    """The pool holds one sequence of full length."""
    options = {"max_model_len": 128, "max_num_seqs": 2}
    memory = smallest_pool(pool_of(tiny_core(**options)).layout, 2, 128).num_bytes
    core = tiny_core(**options, kv_memory=memory)
    text = "The quick brown fox jumps over the lazy dog, and the dog lets it.".replace(" ", "_")
    recorders = run(
        core, [asking(greedy(str(index), random_prompt(index, 60), 66), Exactly(text)) for index in range(2)]
    )
    assert core.scheduler.num_preemptions > 0
    assert [recorder.text for recorder in recorders] == [text, text]


def sound_requests() -> list[Request]:
    return [asking(greedy("digits", PROMPT, 12), Digits()), greedy("free", PROMPT, 12, temperature=1.0, seed=4)]


def deltas(recorders: list[Recorder]) -> list[list[Event]]:
    """Of requests that ended with their 12 tokens; how much of a prompt was cached may differ."""
    assert all(isinstance(recorder.terminal, Finished) and len(recorder.token_ids) == 12 for recorder in recorders)
    return [recorder.events[:-1] for recorder in recorders]


@pytest.mark.parametrize("method", ["start", "fill_mask", "accept", "is_complete"])
def test_a_grammar_that_raises_fails_alone(method: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = deltas(run(tiny_core(batch_invariant=True), sound_requests()))
    core = tiny_core(batch_invariant=True)
    broken, *others = run(core, [asking(greedy("broken", PROMPT, 12), Broken(method)), *sound_requests()])
    assert deltas(others) == expected
    assert isinstance(broken.terminal, Failed) and broken.terminal.error.kind is ErrorKind.INTERNAL
    assert "grammar" in broken.terminal.error.message and "client's own words" not in broken.terminal.error.message
    assert "a grammar failed" in caplog.text
    assert core.scheduler.pools.cache.open.num_held == 0


def test_a_grammar_that_allows_nothing_fails_alone_where_it_does() -> None:
    """After two tokens of a text that is at its end and does not know it."""
    expected = deltas(run(tiny_core(batch_invariant=True), sound_requests()))
    stuck, *others = run(
        tiny_core(batch_invariant=True), [asking(greedy("stuck", PROMPT, 12), Stuck("ab")), *sound_requests()]
    )
    assert deltas(others) == expected
    assert stuck.text == "ab" and isinstance(stuck.terminal, Failed)
    assert "allows no token" in stuck.terminal.error.message


class Stuck(Exactly):
    def start(self) -> _Spelling:
        return _NeverComplete(self.text, self.after)


class _NeverComplete(_Spelling):
    is_complete = False


def test_masks_are_filled_when_the_model_has_been_started() -> None:
    """So that a device computes meanwhile."""
    core, order = tiny_core(kernels="torch"), []
    real = core.runner.model.logits

    def watched(hidden):  # type: ignore[no-untyped-def]
        order.append("model")
        return real(hidden)

    core.runner.model.logits = watched  # type: ignore[method-assign]
    run(core, [asking(greedy("r", PROMPT, 9), Exactly("abc", lambda count: order.append("mask")))])
    assert order == ["model", "mask"] * 3
