"""`--poison`: a page that is read though nobody holds it is noticed, whatever the recipe."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core import EngineCore
from engine.kv.allocator import Allocator
from engine.kv.moves import Poison
from engine.kv.shrink import Streaming
from engine.plan import StepPlan
from engine.runner import StepOutput
from kernels.format.layout import PageRef, Pool
from tests.helpers import COVERING_RECIPES, Recorder, greedy, random_prompt, run, tiny_core

P = 32
Misread = Callable[[tuple[PageRef, ...], PageRef], tuple[PageRef, ...]]


class WrongTable:
    """Stands in front of a runner. Once a page of `pool` is free, a decode row is made to read it."""

    def __init__(self, core: EngineCore, pool: Pool, misread: Misread):
        self._core, self._pool, self._misread = core, pool, misread
        self._run = core.runner.run
        self.freed: list[PageRef] = []
        self.num_misread = 0
        core.runner.run = self.run  # type: ignore[method-assign]

    def run(self, plan: StepPlan) -> StepOutput:
        allocator = self._core.scheduler.pools.cache.allocator(self._pool)
        self.freed += [m.page for m in plan.moves if isinstance(m, Poison) and m.page.pool is self._pool]
        free = [page for page in self.freed if allocator.references(page.id) == 0]
        if free and plan.decode and len(plan.decode[0].row.pages) > 3:
            first, self.num_misread = plan.decode[0], self.num_misread + 1
            row = replace(first.row, pages=self._misread(first.row.pages, free[0]))
            plan.decode[0] = replace(first, row=row)
        return self._run(plan)


def second(pages: tuple[PageRef, ...], wrong: PageRef) -> tuple[PageRef, ...]:
    return (pages[0], wrong, *pages[2:])


def drop_pages(core: EngineCore) -> None:
    """A request that drops pages that no other has, so that they become free."""
    request = replace(greedy("r", random_prompt(1, 5 * P + 9), 2 * P), shrink=Streaming(recent=2))
    core.add([request], [Recorder()])
    while not core.is_idle:
        core.step()


@pytest.mark.parametrize("recipe", COVERING_RECIPES)
def test_a_table_that_lists_a_freed_sealed_page_is_noticed(recipe: str) -> None:
    core = tiny_core(kv_format=recipe, poison=True)
    wrong = WrongTable(core, Pool.SEALED, second)
    with pytest.raises(RuntimeError, match="a hidden state is not finite"):
        drop_pages(core)
    assert wrong.num_misread == 1


def test_a_table_that_lists_a_freed_slot_is_noticed() -> None:
    """In the place of the sink page. The slots are those of requests that have ended."""
    core = tiny_core(kv_format="int4", poison=True)
    wrong = WrongTable(core, Pool.OPEN, lambda pages, free: (free, *pages[1:]))
    run(core, [greedy(f"r{i}", random_prompt(20 + i, 5), 2) for i in range(3)])
    with pytest.raises(RuntimeError, match="a hidden state is not finite"):
        drop_pages(core)
    assert wrong.num_misread == 1


@pytest.mark.parametrize("recipe", COVERING_RECIPES)
def test_without_a_wrong_table_nothing_is_noticed(recipe: str) -> None:
    core, plain = tiny_core(kv_format=recipe, poison=True), tiny_core(kv_format=recipe)
    batch = [greedy(f"r{i}", random_prompt(i, 40 * i + 3), 34) for i in range(4)]
    assert [r.token_ids for r in run(core, batch)] == [r.token_ids for r in run(plain, batch)]
    drop_pages(core)


def test_a_page_handed_out_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences in one slot: the books differ after the very step, with or without poison."""
    core = tiny_core(kv_format="int4")
    core.add([greedy("first", random_prompt(1, 2 * P), 9)], [Recorder()])
    core.step()
    core.step()
    core.scheduler.check()
    (first,) = core.scheduler.running
    real = Allocator.allocate

    def twice(allocator: Allocator) -> int:
        if allocator is core.scheduler.pools.cache.open:
            return first.pages[-1].id
        return real(allocator)

    monkeypatch.setattr(Allocator, "allocate", twice)
    core.add([greedy("second", random_prompt(2, 5), 9)], [Recorder()])
    core.step()
    with pytest.raises(RuntimeError, match="open page . has 1 holders but sequences list it 2 times"):
        core.scheduler.check()
