"""Forks: the prompt is computed once, siblings share its full pages and copy the partial one, whoever leaves when."""

from collections.abc import Sequence

import pytest

from engine.core import EngineCore
from engine.request import Finished, FinishReason, Request
from tests.engine.watch import Watch, memory_for
from tests.helpers import greedy, pool_of, random_prompt, tiny_core

P = 32
NEW = 14
OPTIONS: dict[str, object] = {"batch_invariant": True, "max_model_len": 6 * P}
# partial sink page, filled by its last token but one; full sink page; partial open page, which each sibling fills;
# exactly two pages; three and one token
LENGTHS = (19, P, P + 22, 2 * P, 3 * P + 1)


def sampled(prompt: Sequence[int], id: str) -> Request:
    """Seeded by its id."""
    return greedy(id, prompt, NEW, temperature=1.0, seed=int(id))


class Separate:
    """What siblings say when each is a request of its own on an engine of its own."""

    def __init__(self, recipe: str):
        self.options = OPTIONS | {"kv_format": recipe}
        self._known: dict[tuple[int, str], tuple[int, ...]] = {}

    def tokens(self, length: int, id: str) -> tuple[int, ...]:
        if (length, id) not in self._known:
            watch = Watch(tiny_core(**self.options))
            watch.run(sampled(random_prompt(length, length), id))
            self._known[length, id] = watch.tokens(id)
        return self._known[length, id]


@pytest.fixture(scope="module", params=["native", "int4"])
def separate(request: pytest.FixtureRequest) -> Separate:
    return Separate(request.param)


def forked(core: EngineCore, length: int, count: int = 3) -> Watch:
    watch = Watch(core)
    watch.add(*(sampled(random_prompt(length, length), str(index)) for index in range(count)))
    return watch


@pytest.mark.parametrize("length", LENGTHS)
def test_a_fork_equals_separate_requests_at_every_edge(separate: Separate, length: int) -> None:
    watch = forked(tiny_core(**separate.options), length)
    watch.run()
    assert watch.num_prompt_rows.total() == length
    assert [watch.tokens(id) for id in "012"] == [separate.tokens(length, id) for id in "012"]
    assert len({watch.tokens(id) for id in "012"}) == 3


@pytest.mark.parametrize("length", LENGTHS)
def test_siblings_share_full_pages_and_own_the_partial_one(separate: Separate, length: int) -> None:
    watch = forked(tiny_core(**separate.options), length)
    watch.step()
    full = length // P
    first, *others = (sequence.pages for sequence in watch.core.scheduler.running)
    assert len(others) == 2
    for pages in others:
        assert pages[:full] == first[:full]
    partial = [page for pages in (first, *others) for page in pages[full:]]
    assert len(partial) == len(set(partial)) == (3 if length % P else 0)
    pool = pool_of(watch.core)
    contents = [pool.record(page).numpy().tobytes() for page in partial]
    assert len(set(contents)) <= 1
    watch.run()


@pytest.mark.parametrize("goes", ["0", "1"], ids=["leader", "sibling"])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 6], ids=["waiting", "prefill", "just forked", "decoding"])
def test_whoever_is_cancelled_when_the_others_are_unmoved(separate: Separate, num_steps: int, goes: str) -> None:
    """One page of the prompt a step; the fork is after the third."""
    length = 2 * P + 9
    watch = forked(tiny_core(**separate.options, max_step_tokens=P + 8), length)
    for _ in range(num_steps):
        watch.step()
    assert len(watch.core.scheduler.running) == (0 if num_steps == 0 else 1 if num_steps < 3 else 3)
    watch.core.cancel(goes)
    watch.core.scheduler.check()
    watch.run()
    for id in {"0", "1", "2"} - {goes}:
        assert watch.tokens(id) == separate.tokens(length, id)
    assert watch.tokens(goes) == separate.tokens(length, goes)[: max(0, num_steps - 2)]
    terminal = watch.recorders[goes].terminal
    assert isinstance(terminal, Finished) and terminal.reason is FinishReason.CANCELLED
    # the heir finds what the leader had computed, and only computes what was lost with it
    assert watch.num_prompt_rows.total() == length
    cache = watch.core.scheduler.pools.cache
    assert (cache.open.num_held, cache.sealed.num_held) == (0, 0)


def test_all_siblings_cancelled_in_turn_leave_nothing(separate: Separate) -> None:
    watch = forked(tiny_core(**separate.options, max_step_tokens=P + 8), 2 * P + 9)
    watch.step()
    for id in "102":
        watch.core.cancel(id)
        watch.core.scheduler.check()
    assert watch.core.is_idle and watch.core.scheduler.pools.cache.sealed.num_held == 0


def test_siblings_that_say_the_same_hold_one_page(separate: Separate) -> None:
    """Three greedy siblings: what each fills, one has; only the open pages are three."""
    length, core = 2 * P + 9, tiny_core(**separate.options)
    watch = Watch(core)
    watch.add(*(greedy(str(index), random_prompt(3, length), 2 * P) for index in range(3)))
    cache, sinks = core.scheduler.pools.cache, pool_of(core).layout.recipe.sink_pages
    while not core.is_idle:
        watch.step()
        for sequence in core.scheduler.running[:1]:
            full, rest = divmod(sequence.num_computed_tokens, P)
            assert cache.sealed.num_held == full - sinks
            assert cache.open.num_held == sinks + (3 if rest else 0)
    assert cache.stats.num_adopted_pages == 2 * 2  # two pages were filled, by three
    assert len({watch.tokens(id) for id in "012"}) == 1


def test_a_request_that_repeats_another_seals_nothing(separate: Separate) -> None:
    """The second follows half a page behind, and finds each page that it fills in the tree."""
    length, core = 2 * P + 9, tiny_core(**separate.options)
    watch = Watch(core)
    watch.add(greedy("first", random_prompt(3, length), 2 * P))
    for _ in range(P // 2):
        watch.step()
    watch.add(greedy("second", random_prompt(3, length), 2 * P))
    watch.run()
    stats, sinks = core.scheduler.pools.cache.stats, pool_of(core).layout.recipe.sink_pages
    assert stats.num_sealed_pages == (length + 2 * P - 1) // P - sinks
    assert stats.num_adopted_pages == 0
    assert watch.tokens("first") == watch.tokens("second") and watch.pages["first"] == watch.pages["second"]


def test_a_fork_waits_until_all_its_siblings_have_room(separate: Separate) -> None:
    """Five may run: two do, so a fork of four waits, though one more could start; nobody overtakes it."""
    watch = Watch(tiny_core(**separate.options, max_num_seqs=5))
    for index in range(2):
        watch.add(greedy(f"old {index}", random_prompt(50 + index, 5), 4 + 4 * index))
    watch.step()
    watch.add(*(sampled(random_prompt(20, 20), str(index)) for index in range(4)))
    watch.add(greedy("small", random_prompt(60, 3), 2))
    watch.step()
    assert len(watch.core.scheduler.running) == 2 and watch.core.scheduler.num_waiting == 5
    watch.run()
    assert [watch.tokens(str(index)) for index in range(4)] == [separate.tokens(20, str(index)) for index in range(4)]


def test_siblings_are_preempted_like_others(separate: Separate) -> None:
    """Five siblings fill a page each beside those of the prompt, in a pool for six."""
    layout = pool_of(tiny_core(**separate.options)).layout
    core = tiny_core(**separate.options, kv_memory=memory_for(layout, 6))
    watch = forked(core, 3 * P + 25, count=5)
    watch.run()
    assert core.scheduler.num_preemptions > 0
    for id in map(str, range(5)):
        assert watch.tokens(id) == separate.tokens(3 * P + 25, id)
