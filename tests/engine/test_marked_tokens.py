"""Marked sinks (KVSink): which rows a page keeps, against the residual stream of a plain model, and that pages are the
same bytes however their tokens came."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.kv.shrink import HeavyHitters
from kernels.format.layout import NO_ROW, Pool
from kernels.format.recipe import MarkedTokens, Recipe, SinkRule
from tests.engine.recipes import FLOAT8, INT4, as_float8, recipe
from tests.engine.shrunk_model import ShrunkModel
from tests.engine.watch import Watch, memory_for
from tests.helpers import TINY, RandomCheckpoint, greedy, pool_of, random_prompt, tiny_core

P = 32
NUM_ROWS = 14
RULE = SinkRule(0, (3, 17), 4.0)  # nearly half of the tokens
MARKING = recipe(INT4, replace(INT4, outliers=MarkedTokens(NUM_ROWS)), sink_rule=RULE)
PROMPT = random_prompt(50, P + 7)
NEW = 5 * P
INVARIANT: dict[str, object] = {"batch_invariant": True, "max_step_tokens": 512}


def marking(chosen: Recipe = MARKING, **options: object) -> EngineCore:
    return tiny_core(TINY, chosen, **INVARIANT | options)


def marked(tokens: Sequence[int]) -> list[list[int]]:
    """For each full page of `tokens` the places of marked ones, where the first layer reads FLOAT8 pages, no sinks."""
    plain = ShrunkModel(TINY, RandomCheckpoint(TINY).tensor, len(tokens), P, 0, None, seal=as_float8)
    places: list[list[int]] = [[] for _ in range(-(-len(tokens) // P))]
    for position, token in enumerate(tokens):
        plain.feed(token)
        if plain.residual[RULE.layer, list(RULE.channels)].abs().max() > RULE.threshold:
            places[position // P].append(position % P)
    return places[: len(tokens) // P]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_page_keeps_the_first_marked_rows(batch_invariant: bool) -> None:
    """By prefill in chunks, at a tail that decode fills, and by decode."""
    chosen = recipe(FLOAT8, replace(FLOAT8, outliers=MarkedTokens(NUM_ROWS)), sink_rule=RULE, sink_pages=0)
    core = marking(chosen, batch_invariant=batch_invariant, max_step_tokens=2 * P)
    prompt = random_prompt(52, 4 * P + 20)
    core.add([greedy("r", prompt, NEW)], [lambda event: None])
    while core.scheduler.num_waiting or core.scheduler.running[0].num_computed_tokens < 7 * P:
        core.step()
    (sequence,) = core.scheduler.running
    tokens = sequence.tokens[: sequence.num_computed_tokens]
    pool = pool_of(core)
    field = pool.layout.layers[1].row_places
    assert field is not None
    kept = []
    for page in sequence.pages[: len(tokens) // P]:
        assert page.pool is Pool.SEALED
        places = pool.sealed[page.id, field.offset : field.offset + NUM_ROWS].tolist()
        kept.append([place for place in places if place != NO_ROW])
    expected = marked(tokens)
    assert kept == [places[:NUM_ROWS] for places in expected]
    assert max(map(len, expected)) > NUM_ROWS and any(place < 20 for place in expected[4]) and max(expected[4]) >= 20
    filled = expected[4:]  # by decode rows; the last of them counts as well
    assert any(places[-1] == P - 1 and len(places) <= NUM_ROWS for places in filled)


def test_prefill_equals_decode_equals_batched_equals_preempted_equals_hit() -> None:
    watch = Watch(marking())
    watch.run(greedy("decoded", PROMPT, NEW))
    tokens = [*PROMPT, *watch.tokens("decoded")]
    pages = watch.pages["decoded"]
    assert len(pages) == len(tokens) // P
    watch.run(greedy("hit", tokens, 2))
    assert watch.usage("hit").num_cached_tokens == 6 * P and watch.pages["hit"] == pages
    for chunk in (P + 8, 3 * P + 8):
        chunked = Watch(marking(max_step_tokens=chunk))
        chunked.run(greedy("prefilled", tokens, 2))
        assert chunked.pages["prefilled"] == pages
        assert chunked.tokens("prefilled") == watch.tokens("hit")

    others = [greedy(f"r{i}", random_prompt(60 + i, 3 * P + 5 * i), 2 * P) for i in range(3)]
    alone = Watch(marking())
    for request in others:
        alone.run(request)
    memory = memory_for(pool_of(marking()).layout, 8)
    tight = Watch(marking(max_model_len=8 * P, kv_memory=memory))
    tight.run(greedy("decoded", PROMPT, NEW), *others)
    assert tight.core.scheduler.num_preemptions > 0
    assert tight.pages == {"decoded": pages} | alone.pages
    for request in others:
        assert tight.tokens(request.id) == alone.tokens(request.id)


def test_marks_of_an_open_page_go_with_a_fork_and_a_swap() -> None:
    """Without them the page that a sibling, or a sequence back from host memory, fills would keep other rows."""
    fork = [greedy(str(i), PROMPT, P, temperature=1.0, seed=i) for i in range(3)]
    together = Watch(marking())
    together.add(*fork)
    together.run()
    alone = Watch(marking())
    for request in fork:
        alone.run(replace(request, salt=request.id))
    assert together.pages == alone.pages
    assert [together.tokens(r.id) for r in fork] == [alone.tokens(r.id) for r in fork]

    shrink = HeavyHitters(heavy=50)  # drops nothing here, but is swapped all the same
    lengths = (2 * P + 9, 5 * P, 3 * P + 30)
    batch = [replace(greedy(f"r{i}", random_prompt(70 + i, n), P + 15), shrink=shrink) for i, n in enumerate(lengths)]
    roomy = Watch(marking(host_memory=2**22))
    for request in batch:
        roomy.run(request)
    memory = memory_for(pool_of(roomy.core).layout, 8)
    tight = Watch(marking(max_model_len=8 * P, kv_memory=memory, host_memory=2**22))
    tight.run(*batch)
    assert tight.core.scheduler.pools.cache.stats.num_swaps > 0
    assert tight.pages == roomy.pages
