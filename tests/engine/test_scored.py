"""Logprobs of prompts: complete, told once, and the same however the prompt was computed and with whom."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from engine.core import EngineCore
from engine.kv.sizing import smallest_pool
from engine.plan import StepPlan
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request, Scored, TokenLogprob, Usage
from engine.runner import StepOutput
from kernels.format.layout import Pool
from tests.engine import plain_model
from tests.engine.oracle_model import log_likelihoods
from tests.helpers import TINY, RandomCheckpoint, greedy, pool_of, random_prompt, tiny_core, tiny_engine

P = 32
OPTIONS: dict[str, object] = {"batch_invariant": True, "kv_format": "int4", "max_model_len": 8 * P}
PROMPT = random_prompt(17, 3 * P + 11)


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def scores(self) -> tuple[TokenLogprob | None, ...]:
        """Of a request that ended well: told once, before all tokens."""
        first, *others, last = self.events
        assert isinstance(first, Scored) and isinstance(last, Finished)
        assert all(isinstance(event, Delta) for event in others)
        return first.logprobs

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def usage(self) -> Usage:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last.usage


def add(core: EngineCore, *fork: Request) -> list[Listener]:
    listeners = [Listener() for _ in fork]
    core.add(fork, listeners)
    return listeners


def finish(core: EngineCore) -> None:
    while not core.is_idle:
        core.step()
        core.scheduler.check()


def run(core: EngineCore, *requests: Request) -> list[Listener]:
    """Together, none with siblings."""
    listeners = [add(core, request)[0] for request in requests]
    finish(core)
    return listeners


def scored(id: str, prompt: Sequence[int], max_tokens: int = 0, num_top: int = 2, **fields: object) -> Request:
    return greedy(id, prompt, max_tokens, num_prompt_logprobs=num_top, **fields)


@pytest.fixture(scope="module")
def alone() -> tuple[TokenLogprob | None, ...]:
    """Of PROMPT, on an engine of its own."""
    (listener,) = run(tiny_core(**OPTIONS), scored("r", PROMPT))
    return listener.scores


@pytest.mark.parametrize("length", [1, 2, P, P + 1, 100])
def test_scores_are_those_of_the_plain_model(length: int) -> None:
    prompt = random_prompt(length, length)
    (listener,) = run(tiny_core(TINY), scored("r", prompt, num_top=4))
    assert [type(event) for event in listener.events] == [Scored, Finished]
    assert listener.events[-1] == Finished(FinishReason.LENGTH, Usage(length, 0, 0))
    first, *others = listener.scores
    assert first is None and [one.token_id for one in others if one] == prompt[1:]
    frequencies = [10000.0 ** (-2 * pair / TINY.head_dim) for pair in range(TINY.head_dim // 2)]
    logits = plain_model.logits(TINY, RandomCheckpoint(TINY).tensor, frequencies, prompt).numpy()
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, one in enumerate(others):
        assert one is not None
        # an fp32 model of two layers: logits of a few units, sums of at most a hundred terms
        assert one.logprob == pytest.approx(expected[row, one.token_id], abs=1e-3)
        assert [token for token, _ in one.top] == np.argsort(-expected[row])[:4].tolist()


def test_scores_are_those_of_the_oracle_that_reads_sealed_pages(alone: tuple[TokenLogprob | None, ...]) -> None:
    expected = log_likelihoods(tiny_engine(**OPTIONS), PROMPT)
    assert [one.logprob for one in alone if one] == pytest.approx(expected, abs=1e-3)


def test_tokens_have_the_same_logprobs_generated_and_scored() -> None:
    """Bit for bit, with those beside them: as decode rows of a step, and as rows of a prompt."""
    prompt, core = PROMPT[:40], tiny_core(**OPTIONS)
    (generated,) = run(core, greedy("g", prompt, 70, num_logprobs=3, temperature=1.0, seed=5))
    (told,) = run(core, scored("s", [*prompt, *generated.tokens], num_top=3))
    assert told.scores[len(prompt) :] == tuple(one for delta in generated.deltas for one in delta.logprobs)


def test_company_and_chunks_do_not_change_scores(alone: tuple[TokenLogprob | None, ...]) -> None:
    for max_step_tokens in (40, 72, 1024):
        core = tiny_core(**OPTIONS, max_step_tokens=max_step_tokens)
        others = [
            greedy("plain", random_prompt(1, 50), 20, num_logprobs=1),
            scored("other", random_prompt(2, 90), 9, num_top=7),
            scored("long", random_prompt(3, 200), 3, num_top=0),
        ]
        *_, listener = run(core, *others, scored("r", PROMPT, 5))
        assert listener.scores == alone
        assert listener.usage == Usage(len(PROMPT), 0, 5)


def test_more_likeliest_tokens_are_the_same_and_more(alone: tuple[TokenLogprob | None, ...]) -> None:
    none, many = run(tiny_core(**OPTIONS), scored("0", PROMPT, num_top=0), scored("6", PROMPT, num_top=6))
    assert all(one is None or len(one.top) == 6 for one in many.scores)
    for listener, count in ((none, 0), (many, 2)):
        cut = tuple(one and replace(one, top=one.top[:count]) for one in listener.scores)
        assert cut == tuple(one and replace(one, top=one.top[:count]) for one in alone)


def test_a_scored_prompt_finds_nothing_and_is_found(alone: tuple[TokenLogprob | None, ...]) -> None:
    core = tiny_core(**OPTIONS)
    (cold,) = run(core, greedy("cold", PROMPT, 6))
    (again,) = run(core, scored("again", PROMPT, 6))
    assert again.usage == Usage(len(PROMPT), 0, 6) and again.scores == alone
    assert again.tokens == cold.tokens
    core = tiny_core(**OPTIONS)
    run(core, scored("first", PROMPT))
    (plain,) = run(core, greedy("plain", PROMPT, 6))
    assert plain.usage == Usage(len(PROMPT), 3 * P, 6) and plain.tokens == cold.tokens


def test_a_scored_prompt_does_not_wait_for_another() -> None:
    """Of four pages of seven the first has computed, only the one that may use them waits for more."""
    prompt = random_prompt(18, 6 * P + 11)
    (expected,) = run(tiny_core(**OPTIONS), scored("r", prompt, 3))
    core = tiny_core(**OPTIONS, max_step_tokens=4 * P + 8)
    (first,) = add(core, greedy("first", prompt, 3))
    core.step()
    (waits,) = add(core, greedy("waits", prompt, 3))
    (starts,) = add(core, scored("starts", prompt, 3))
    core.step()
    assert {sequence.request.id for sequence in core.scheduler.running} == {"first", "starts"}
    finish(core)
    assert (waits.usage.num_cached_tokens, starts.usage.num_cached_tokens) == (6 * P, 0)
    assert starts.scores == expected.scores
    assert first.tokens == waits.tokens == starts.tokens == expected.tokens


def test_scored_prompts_that_leave_midway_leave_nothing(alone: tuple[TokenLogprob | None, ...]) -> None:
    """Two compute the same pages; the second claims them and goes."""
    core = tiny_core(**OPTIONS, max_step_tokens=4 * P)
    (stays,) = add(core, scored("stays", PROMPT, 3))
    (goes,) = add(core, scored("goes", PROMPT, 3))
    core.step()
    core.cancel("goes")
    core.scheduler.check()
    finish(core)
    assert [type(event) for event in goes.events] == [Finished]
    assert stays.scores == alone


@pytest.mark.parametrize("num_steps", [3, 4, 7])
@pytest.mark.parametrize("is_spoilt", [False, True])
def test_preempted_ones_tell_complete_scores_once(num_steps: int, is_spoilt: bool) -> None:
    """Preempted by hand while its prompt is computed, a page a step, and later; `is_spoilt`: what it had computed was
    reclaimed meanwhile."""
    prompt = random_prompt(8, 5 * P + 3)
    (expected,) = run(tiny_core(**OPTIONS), scored("r", prompt, 5))
    core = tiny_core(**OPTIONS, max_step_tokens=P + 8)
    (listener,) = add(core, scored("r", prompt, 5))
    for _ in range(num_steps):
        core.step()
    (sequence,) = core.scheduler.running
    core.scheduler._preempt(sequence, StepPlan())
    core.scheduler.check()
    if is_spoilt:
        cache = core.scheduler.pools.cache
        for page in [cache.allocate(pool) for pool in Pool for _ in range(cache.allocator(pool).num_available)]:
            cache.release(page)
        assert not list(cache.tree.nodes())
    rows = count_rows(core)
    finish(core)
    assert listener.scores == expected.scores and listener.tokens == expected.tokens
    assert listener.usage == Usage(len(prompt), 0, 5)
    num_computed = min(len(prompt), num_steps * P)
    if not is_spoilt:  # what it had told itself comes from the tree
        assert sum(rows) <= len(prompt) + 5 - num_computed // P * P + P


def count_rows(core: EngineCore) -> list[int]:
    """Rows of each step from here on."""
    rows: list[int] = []
    real = core.runner.run

    def counting(plan: StepPlan) -> StepOutput:
        rows.append(len(plan.decode) + sum(item.chunk.length for item in plan.chunks))
        return real(plan)

    core.runner.run = counting  # type: ignore[method-assign]
    return rows


def test_a_small_pool_preempts_scored_requests_and_nothing_changes() -> None:
    prompts = [random_prompt(20 + index, 60 + 20 * index) for index in range(4)]
    batch = [scored(str(index), prompt, 60, num_logprobs=1) for index, prompt in enumerate(prompts)]
    expected = [run(tiny_core(**OPTIONS), request)[0].events for request in batch]
    layout = pool_of(tiny_core(**OPTIONS)).layout
    memory = smallest_pool(layout, 8, 8 * P).num_bytes
    core = tiny_core(**OPTIONS, kv_memory=memory)
    assert [listener.events for listener in run(core, *batch)] == expected
    assert core.scheduler.num_preemptions > 0


def test_each_sibling_that_asks_is_told_what_it_asked_for(alone: tuple[TokenLogprob | None, ...]) -> None:
    """The leader asks for nothing, and the prompt is computed once."""
    core = tiny_core(**OPTIONS)
    rows = count_rows(core)
    fork = [greedy("0", PROMPT, 4), scored("1", PROMPT, 4), scored("2", PROMPT, 4, num_top=0), scored("3", PROMPT, 0)]
    plain, two, none, only = add(core, *fork)
    finish(core)
    assert not any(isinstance(event, Scored) for event in plain.events)
    assert two.scores == alone and only.scores == alone
    assert none.scores == tuple(one and replace(one, top=()) for one in alone)
    assert (only.deltas, only.usage) == ([], Usage(len(PROMPT), 0, 0))
    assert plain.tokens == two.tokens == none.tokens and len(plain.tokens) == 4
    assert rows[0] == len(PROMPT) and sum(rows) == len(PROMPT) + 3 * 3


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_the_heir_of_a_cancelled_leader_is_told_all(num_steps: int, alone: tuple[TokenLogprob | None, ...]) -> None:
    core = tiny_core(**OPTIONS, max_step_tokens=P + 8)
    rows = count_rows(core)
    _, heir, other = add(core, *(scored(str(index), PROMPT, 4) for index in range(3)))
    for _ in range(num_steps):
        core.step()
    core.cancel("0")
    finish(core)
    assert heir.scores == other.scores == alone
    assert heir.usage == other.usage == Usage(len(PROMPT), 0, 4)
    assert sum(rows) == len(PROMPT) + 2 * 3  # what the leader had computed is not computed again


def test_logits_of_a_prompt_that_are_not_finite_fail_it_alone() -> None:
    core = tiny_core(**OPTIONS)
    (sick,) = add(core, scored("sick", PROMPT, 4))
    (sound,) = add(core, scored("sound", PROMPT[:50], 4))
    real = core.runner.run

    def run_with_a_sick_row(plan: StepPlan) -> StepOutput:
        output = real(plan)
        for sequence, scores in output.scores.items():
            if sequence.request.id == "sick":
                scores[3] = None
        return output

    core.runner.run = run_with_a_sick_row  # type: ignore[method-assign]
    finish(core)
    (failed,) = sick.events
    assert isinstance(failed, Failed) and "no finite numbers" in failed.error.message
    assert len(sound.scores) == 50


def test_logits_of_a_prompt_are_computed_in_tiles() -> None:
    core = tiny_core(max_step_tokens=1024, kernels="torch")
    real, sizes = core.runner.model.logits, []

    def watched(hidden):  # type: ignore[no-untyped-def]
        sizes.append(len(hidden))
        return real(hidden)

    core.runner.model.logits = watched  # type: ignore[method-assign]
    run(core, scored("r", random_prompt(0, 300), 2))
    assert max(sizes) == 64 and sum(sizes) == 299 + 2
