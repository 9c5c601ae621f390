"""A window of pages in 16 bit (SKVQ): against a plain model that reads just those exactly, and against itself under
other schedules."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.errors import StartupError
from engine.kv.sizing import num_slots
from kernels.format.recipe import MarkedTokens, SinkRule
from tests.engine.recipes import FLOAT8, INT4, INT4_BEFORE_ROPE, as_float8, recipe
from tests.engine.shrunk_model import ShrunkModel
from tests.engine.watch import Pages, Watch, memory_for
from tests.helpers import TINY, RandomCheckpoint, greedy, pool_of, random_prompt, run, tiny_core, tiny_engine

P = 32
INVARIANT: dict[str, object] = {"batch_invariant": True, "max_step_tokens": 512}


def distance(prompt: Sequence[int], tokens: Sequence[int], sinks: int, window: int) -> float:
    """How far, in logits, a token is at most from being the one that the plain model would say there."""
    plain = ShrunkModel(TINY, RandomCheckpoint(TINY).tensor, len(prompt), P, sinks, None, window=window, seal=as_float8)
    for token in prompt:
        logits = plain.feed(token)
    worst = 0.0
    for token in tokens:
        worst = max(worst, float(logits.max() - logits[token]))
        logits = plain.feed(token)
    return worst


@pytest.mark.parametrize("length", [1, P - 1, P, 4 * P, 5 * P + 9])
@pytest.mark.parametrize(("sinks", "window"), [(1, 1), (1, 2), (0, 1), (2, 3)])
def test_tokens_are_those_of_a_plain_model(sinks: int, window: int, length: int) -> None:
    """Prompts shorter and longer than the window, then decode over the ends of pages."""
    prompt = random_prompt(length, length)
    core = tiny_core(TINY, recipe(FLOAT8, sink_pages=sinks, window_pages=window))
    (recorder,) = run(core, [greedy("r", prompt, 2 * P + 5)])
    assert distance(prompt, recorder.token_ids, sinks, window) < 1e-4


def test_one_page_more_or_less_would_show() -> None:
    prompt = random_prompt(3, 6 * P + 9)
    (recorder,) = run(tiny_core(TINY, recipe(FLOAT8, window_pages=2)), [greedy("r", prompt, 2 * P + 5)])
    assert distance(prompt, recorder.token_ids, 1, 2) < 1e-4
    for other in (0, 1, 3):
        assert distance(prompt, recorder.token_ids, 1, other) > 1e-2


RULE = SinkRule(0, (3, 17), 4.0)
RECIPES = {
    "window of 1": recipe(INT4, window_pages=1),
    "window of 2": recipe(INT4, window_pages=2),
    "no sinks": recipe(INT4, sink_pages=0, window_pages=2),
    "before RoPE": recipe(INT4_BEFORE_ROPE, window_pages=2),
    "marked": recipe(INT4, replace(INT4, outliers=MarkedTokens(14)), window_pages=2, sink_rule=RULE),
}


@pytest.mark.parametrize("name", RECIPES)
def test_alone_equals_batched_equals_chunked_equals_preempted(name: str) -> None:
    chosen = RECIPES[name]
    batch = [
        greedy(f"r{i}", random_prompt(80 + i, n), P + 6) for i, n in enumerate((1, P, P + 2, 3 * P - 1, 5 * P + 4))
    ]

    def done(core: EngineCore, together: bool = True) -> tuple[dict[str, tuple[int, ...]], dict[str, Pages]]:
        watch = Watch(core)
        for group in [batch] if together else [[request] for request in batch]:
            watch.run(*group)
        assert core.scheduler.pools.cache.stats.num_hit_tokens == 0
        return {request.id: watch.tokens(request.id) for request in batch}, watch.pages

    def core(**options: object) -> EngineCore:
        return tiny_core(TINY, chosen, **INVARIANT | options)

    alone = done(core(), together=False)
    assert done(core()) == alone
    assert done(core(max_step_tokens=8 + P)) == alone
    tight = core(max_model_len=7 * P, kv_memory=memory_for(pool_of(core()).layout, 7))
    assert done(tight) == alone
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize("name", ["window of 2", "marked"])
def test_prefill_equals_decode(name: str) -> None:
    watch = Watch(tiny_core(TINY, RECIPES[name], **INVARIANT))
    prompt = random_prompt(90, P + 7)
    watch.run(greedy("decoded", prompt, 5 * P))
    tokens = [*prompt, *watch.tokens("decoded")]
    watch.run(greedy("prefilled", tokens, 2))
    assert watch.num_prompt_rows["prefilled"] == len(tokens)  # nothing of it was cached
    assert watch.pages["prefilled"] == watch.pages["decoded"] and len(watch.pages["decoded"]) == 6


@pytest.mark.parametrize("length", [3 * P + 5, 4 * P])
def test_siblings_say_what_they_say_alone(length: int) -> None:
    prompt = random_prompt(91, length)
    fork = [greedy(str(i), prompt, 2 * P, temperature=1.0, seed=i) for i in range(3)]
    together, alone = (Watch(tiny_core(TINY, RECIPES["window of 2"], **INVARIANT)) for _ in range(2))
    together.add(*fork)
    together.run()
    alone.run(*fork)
    assert together.pages == alone.pages
    assert [together.tokens(r.id) for r in fork] == [alone.tokens(r.id) for r in fork]
    assert len({together.tokens(r.id) for r in fork}) == 3
    assert together.num_prompt_rows["1"] == together.num_prompt_rows["2"] == 0


@pytest.mark.parametrize("window", [1, 3])
def test_slots_that_a_sequence_takes(window: int) -> None:
    """1 + S + 2 W while its prompt is computed, 1 + S + W afterwards; the pool has them for all at once."""
    core = tiny_core(TINY, recipe(INT4, window_pages=window), max_num_seqs=3)
    slots = core.scheduler.pools.cache.open
    assert slots.num_total == 3 * (1 + 1 + 2 * window) + 8
    assert pool_of(core).open.shape[0] == num_slots(3, 1, window) == 1 + slots.num_total
    core.add([greedy("r", random_prompt(92, 12 * P + 5), 4 * P)], [lambda event: None])
    most: dict[bool, int] = {}
    while not core.is_idle:
        plan = core.scheduler.plan()
        is_decoding = bool(plan.decode)
        most[is_decoding] = max(most.get(is_decoding, 0), slots.num_held)
        output = core.runner.run(plan)
        core.scheduler.commit(plan, output.mass, output.marks)
        (sequence,) = plan.sampled or core.scheduler.running
        for token in output.tokens:
            assert token is not None
            sequence.tokens.append(token)
        core.scheduler.check()
        if sequence.num_generated_tokens == 4 * P:
            core.cancel("r")
    assert most == {False: 2 + 2 * window, True: 2 + window}
    assert slots.num_held == 0


@pytest.mark.parametrize("option", [{"cache_dir": "pages"}, {"host_memory": 2**20}, {"shrink": "streaming"}])
def test_what_makes_no_sense_with_a_window_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(StartupError, match=r"^--\S+ is .*window[^\n]*leave") as error:
        tiny_engine(TINY, kv_format="int4", window_pages=2, **option)
    assert str(error.value).startswith(f"--{next(iter(option)).replace('_', '-')} ")


def test_native_pages_need_no_window() -> None:
    engine = tiny_engine(TINY, kv_format="native", window_pages=2, host_memory=2**20)
    assert engine.core.scheduler.pools.rules.window_pages == 0
    assert engine.info.why_none_is_dropped is None
    with pytest.raises(StartupError, match="--window-pages is -1; it must be at least 0"):
        tiny_engine(TINY, window_pages=-1)
