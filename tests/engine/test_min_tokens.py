"""Ends that come too early, and requests with penalties in the engine: in company, preempted and forked."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.detokenizer import TextStream
from engine.kv.sizing import smallest_pool
from engine.request import Finished, FinishReason, Request
from kernels.format.step import AttentionStep
from tests.engine.watch import Watch
from tests.helpers import TINY, Recorder, byte_tokenizer, greedy, pool_of, random_prompt, run, tiny_core

PROMPT = random_prompt(3, 40)


def one(request: Request, eos: frozenset[int] = frozenset()) -> Recorder:
    core = tiny_core(batch_invariant=True)
    core._eos_token_ids = eos
    (recorder,) = run(core, [request])
    return recorder


def reason(recorder: Recorder) -> tuple[FinishReason, str | int | None]:
    assert isinstance(recorder.terminal, Finished)
    return recorder.terminal.reason, recorder.terminal.matched_stop


@pytest.mark.parametrize("is_eos", [False, True], ids=["stop id", "eos"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ends_do_not_come_before_min_tokens(is_eos: bool, temperature: float) -> None:
    """With a bias of 100 the end would be the first token; it is the first that it may be."""
    ends = frozenset({17, 31, 200})
    bias = tuple((token, 100.0) for token in ends)
    fields = {"temperature": temperature, "seed": 5, "logit_bias": bias, "ignore_eos": not is_eos}
    if not is_eos:
        fields["stop_token_ids"] = ends
    for min_tokens in (0, 1, 7):
        recorder = one(greedy("r", PROMPT, 20, min_tokens=min_tokens, **fields), ends if is_eos else frozenset())
        assert len(recorder.token_ids) == min_tokens + 1
        assert not ends & {*recorder.token_ids[:-1]} and recorder.token_ids[-1] in ends
        assert reason(recorder) == (FinishReason.STOP, None if is_eos else recorder.token_ids[-1])


def test_an_end_of_sequence_that_is_ignored_may_come_early() -> None:
    recorder = one(greedy("r", PROMPT, 5, min_tokens=4, logit_bias=((17, 100.0),)), frozenset({17}))
    assert recorder.token_ids == (17,) * 5 and reason(recorder) == (FinishReason.LENGTH, None)


def test_stop_strings_are_found_behind_min_tokens_only() -> None:
    """The answer is one letter again and again."""
    letter = ((65 - 33, 100.0),)
    for min_tokens, length in ((0, 3), (1, 4), (2, 5), (6, 9)):
        recorder = one(greedy("r", PROMPT, 9, min_tokens=min_tokens, logit_bias=letter, stop=("AAA",)))
        assert (recorder.text, len(recorder.token_ids)) == ("A" * min_tokens, length)
        assert reason(recorder) == (FinishReason.STOP, "AAA")
    recorder = one(greedy("r", PROMPT, 8, min_tokens=6, logit_bias=letter, stop=("AAA",)))
    assert recorder.text == "A" * 8 and reason(recorder) == (FinishReason.LENGTH, None)


STOPS = st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2)


@given(st.lists(st.sampled_from("ab€"), max_size=20).map("".join), STOPS, st.integers(0, 30))
def test_pieces_join_to_the_text_up_to_the_first_stop_behind(
    text: str, stop: Sequence[str], num_unsearched: int
) -> None:
    """By `str.find` in what is completed behind the first `num_unsearched` bytes, each of which is a token."""
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = text.encode()
    assert len(ids) == len(data)
    start = len(data[:num_unsearched].decode(errors="ignore"))
    found = [(text.find(s, start) + len(s), -len(s), s) for s in stop if text.find(s, start) >= 0]
    expected = text[: min(found)[0] + min(found)[1]] if found else text
    stream = TextStream(tokenizer, tuple(stop), [], num_unsearched)
    pieces = [stream.feed(token) for token in ids]
    assert "".join(pieces) + stream.finish() == expected
    assert stream.matched == (min(found)[2] if found else None)


BATCH = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "temperature": 0.8, "seed": 3},
    {"min_p": 0.1, "temperature": 1.2, "seed": 4, "num_logprobs": 2},
    {"logit_bias": ((40, 3.0), (41, -100.0)), "repetition_penalty": 0.8, "temperature": 1.0, "seed": 5},
    {},
    {"repetition_penalty": 1.1, "presence_penalty": 1.0, "frequency_penalty": 0.3, "min_tokens": 30, "num_logprobs": 0},
]


def batch() -> list[Request]:
    return [greedy(str(i), random_prompt(i, 30 + 17 * i), 40, **fields) for i, fields in enumerate(BATCH)]


def test_batched_is_alone_is_preempted() -> None:
    options = {"batch_invariant": True, "kv_format": "int4", "max_model_len": 192}
    alone = [run(tiny_core(**options), [request])[0].events[:-1] for request in batch()]
    assert len({str(events) for events in alone}) == len(BATCH)
    together = run(tiny_core(**options), batch())
    memory = smallest_pool(pool_of(tiny_core(**options)).layout, 8, 192).num_bytes
    tight = tiny_core(**options, kv_memory=memory)
    preempted = run(tight, batch())
    assert tight.scheduler.num_preemptions > 0
    assert [recorder.events[:-1] for recorder in together] == alone
    assert [recorder.events[:-1] for recorder in preempted] == alone


def test_forks_count_each_its_own_tokens() -> None:
    fields = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "temperature": 1.0}
    requests = [greedy(str(seed), PROMPT, 30, seed=seed, **fields) for seed in range(3)]
    alone = [run(tiny_core(batch_invariant=True), [request])[0].token_ids for request in requests]
    watch = Watch(tiny_core(batch_invariant=True))
    watch.add(*requests)
    watch.run()
    assert [watch.tokens(str(seed)) for seed in range(3)] == alone and len({*alone}) == 3


def test_a_frequency_penalty_of_2_wears_a_bias_down() -> None:
    """A bias of 40 against 2 for each time it came: 20 times, give or take what the logits differ by."""
    (recorder,) = run(tiny_core(), [greedy("r", PROMPT, 60, logit_bias=((9, 40.0),), frequency_penalty=2.0)])
    assert recorder.token_ids[:10] == (9,) * 10
    assert 10 < recorder.token_ids.count(9) < 25


class Eager:
    """Stands in for recorded graphs: runs decode steps as they come, and uses its logits again."""

    def __init__(self, core: EngineCore):
        self._model, self._backend = core.runner.model, core.runner.backend
        self._logits = torch.empty(8, TINY.vocab_size)
        self.num_steps = 0

    def can_run(self, step: AttentionStep) -> bool:
        return not step.chunks

    def logits(self, token_ids: list[int], positions: list[int], step: AttentionStep) -> torch.Tensor:
        tables = self._backend.prepare(step)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._backend.append(layer, k, v, tables)
            return self._backend.attend(layer, q, k, v, tables)

        self.num_steps += 1
        hidden = self._model.forward(torch.tensor(token_ids), torch.tensor(positions), attention)
        return self._logits[: len(token_ids)].copy_(self._model.logits(hidden))


def test_replayed_steps_are_sampled_alike() -> None:
    expected = [recorder.events for recorder in run(tiny_core(), batch())]
    core = tiny_core()
    core.runner.replay = replay = Eager(core)
    assert [recorder.events for recorder in run(core, batch())] == expected
    assert replay.num_steps > 30
