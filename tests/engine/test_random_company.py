"""Random arrivals, forks, hooks, priorities and cancels in a pool that is too small, whose free pages are full of NaN:
what each request says is what it says alone."""

import random
from dataclasses import replace

import pytest

from engine.kv.shrink import HeavyHitters, Shrink, Streaming
from engine.request import Finished, FinishReason, Request
from tests.engine.watch import memory_for
from tests.helpers import TINY, TINY_QWEN2, Recorder, greedy, pool_of, random_prompt, run, tiny_core

LENGTH = 160
STEM = random_prompt(999, 70)


def random_fork(rng: random.Random, id: int, shrinks: list[Shrink | None]) -> list[Request]:
    """One to three requests with one prompt, half of which begin like others."""
    length = rng.choice([1, 31, 32, 33, 64, rng.randint(1, 90), 75, 90])
    prompt = (STEM[: rng.choice([0, 40, 70])] + random_prompt(id, length))[:length]
    max_tokens, priority = rng.randint(8, 60), rng.choice([0, 0, 1])
    shrink, fork = rng.choice(shrinks), []
    for index in range(rng.choice([1, 1, 1, 2, 3])):
        sampling = {"temperature": rng.choice([0.0, 1.0]), "seed": id + index, "top_p": 0.9}
        request = greedy(f"{id}.{index}", prompt, max_tokens, **sampling)
        fork.append(replace(request, priority=priority, shrink=shrink))
    return fork


@pytest.mark.parametrize(("recipe", "seed", "has_host"), [("native", 13, True), ("int4", 11, False), ("int4", 5, True)])
def test_company_cancels_and_preemption_do_not_change_tokens(recipe: str, seed: int, has_host: bool) -> None:
    rng = random.Random(f"{recipe} {seed}")
    model = rng.choice([TINY, TINY_QWEN2])
    options: dict[str, object] = {"kv_format": recipe, "batch_invariant": True, "max_model_len": LENGTH}
    shrinks: list[Shrink | None] = [None, None, None, Streaming(recent=1)]
    shrinks += [HeavyHitters(heavy=1, recent=1, window=8)] * has_host
    layout = pool_of(tiny_core(model, **options)).layout
    tight: dict[str, object] = {
        "kv_memory": memory_for(layout, 5 - layout.recipe.sink_pages, 5),
        "max_num_seqs": 5,
        "poison": True,
    }
    tight |= {"host_memory": 60 * layout.page_bytes} if has_host else {}
    core = tiny_core(model, **options, **tight, max_step_tokens=37 + rng.randrange(64))

    forks = [random_fork(rng, id, shrinks) for id in range(9)]
    requests = [request for fork in forks for request in fork]
    recorders = {request.id: Recorder() for request in requests}
    arriving = list(forks)
    while arriving or not core.is_idle:
        for _ in range(rng.choice([0, 0, 0, 0, 1, 4])):
            if arriving:
                fork = arriving.pop()
                core.add(fork, [recorders[request.id] for request in fork])
        if rng.random() < 0.02:
            core.cancel(rng.choice(requests).id)  # maybe not there yet, maybe ended
        if not core.is_idle:
            core.step()
        core.scheduler.check()
    stats = core.scheduler.pools.cache.stats
    assert min(stats.num_preemptions, stats.num_hit_tokens, stats.reclaimed.total(), stats.num_dropped_pages) > 0
    assert not has_host or min(stats.num_swaps, stats.num_restored_pages) > 0
    for pool in (core.scheduler.pools.cache.open, core.scheduler.pools.cache.sealed):
        assert (pool.num_held, pool.num_available) == (0, pool.num_total)

    alone = tiny_core(model, **options, host_memory=2**20)
    num_cancelled = 0
    for request in requests:
        (expected,) = run(alone, [replace(request, salt=f"shares with nobody: {request.id}")])
        ours = recorders[request.id].terminal
        assert isinstance(ours, Finished) and isinstance(expected.terminal, Finished)
        deltas = recorders[request.id].events[:-1]
        if ours.reason is FinishReason.CANCELLED:
            num_cancelled += 1
            assert deltas == expected.events[: len(deltas)]
        else:
            assert deltas == expected.events[:-1]
            usage = replace(ours.usage, num_cached_tokens=0)
            assert replace(ours, usage=usage) == expected.terminal
    assert num_cancelled < len(requests) / 2
