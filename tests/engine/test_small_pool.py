"""A pool for a quarter of the load gives the tokens and the pages of one for all of it."""

import pytest

from engine.request import Request
from tests.engine.watch import Watch, memory_for
from tests.helpers import greedy, pool_of, random_prompt, tiny_core

P = 32
NEW = P + 8


def load() -> list[list[Request]]:
    """Twelve prompts, of which four share their first two pages; one is forked; lengths up to five pages."""
    stem = random_prompt(100, 2 * P)
    forks = []
    for index in range(12):
        length = (5, P, 2 * P + 1, 4 * P)[index % 4] + index
        prompt = ((stem if index % 3 == 0 else []) + random_prompt(index, length))[: 4 * P + 11]
        count = 3 if index == 5 else 1
        sampling = {"temperature": 1.0 if index % 2 else 0.0}
        forks.append([greedy(f"{index}.{i}", prompt, NEW, seed=i, **sampling) for i in range(count)])
    return forks


@pytest.mark.parametrize(("recipe", "host_memory"), [("native", 2**20), ("int4", None)])
def test_a_quarter_of_the_pages_gives_the_same_tokens_and_pages(recipe: str, host_memory: int | None) -> None:
    options: dict[str, object] = {"kv_format": recipe, "batch_invariant": True, "max_model_len": 5 * P + 11}
    layout = pool_of(tiny_core(**options)).layout
    sinks = layout.recipe.sink_pages
    forks = load()
    offered = sum((len(r.prompt) + NEW - 1) // P - sinks for fork in forks for r in fork if len(r.prompt) + NEW > P)
    watches = []
    for num_pages in (offered, offered // 4):
        memory = memory_for(layout, num_pages, 14)
        core = tiny_core(**options, max_num_seqs=14, kv_memory=memory, host_memory=host_memory)
        watch = Watch(core)
        for fork in forks:
            watch.add(*fork)
        watch.run()
        watches.append(watch)
    large, small = watches
    assert large.core.scheduler.num_preemptions == 0 < small.core.scheduler.num_preemptions
    ids = [request.id for fork in forks for request in fork]
    assert [small.tokens(id) for id in ids] == [large.tokens(id) for id in ids]
    assert len({large.tokens(id) for id in ids}) > 10
    assert small.pages == large.pages
