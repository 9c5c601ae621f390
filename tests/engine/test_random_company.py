"""Random arrivals, priorities and cancels in a pool that is too small: what each request says is what it says alone."""

import random
from dataclasses import replace

import pytest

from engine.kv.sizing import num_slots, smallest_pool
from engine.request import Finished, FinishReason, Request
from tests.helpers import TINY, TINY_QWEN2, Recorder, greedy, pool_of, random_prompt, run, tiny_core

LENGTH = 160


def random_request(rng: random.Random, id: int) -> Request:
    prompt = rng.choice([1, 31, 32, 33, 64, rng.randint(1, 90)])
    sampling = {} if rng.random() < 0.5 else {"temperature": 1.0, "seed": id, "top_p": 0.9}
    request = greedy(str(id), random_prompt(id, prompt), rng.randint(20, min(120, LENGTH - prompt)), **sampling)
    return replace(request, priority=rng.choice([0, 0, 1]))


@pytest.mark.parametrize(("recipe", "seed"), [("native", 0), ("int4", 1), ("fp8_e4m3", 2)])
def test_company_cancels_and_preemption_do_not_change_tokens(recipe: str, seed: int) -> None:
    rng = random.Random(f"{recipe} {seed}")
    model = rng.choice([TINY, TINY_QWEN2])
    options = {"kv_format": recipe, "batch_invariant": True, "max_model_len": LENGTH, "max_num_seqs": 5}
    layout = pool_of(tiny_core(model, **options)).layout
    memory = smallest_pool(layout, 5, LENGTH).num_bytes
    core = tiny_core(model, **options, kv_memory=memory, max_step_tokens=37 + rng.randrange(64))
    assert core.scheduler.pools.cache.open.num_total == num_slots(5, layout.recipe.sink_pages) - 1

    requests = [random_request(rng, id) for id in range(16)]
    recorders = {request.id: Recorder() for request in requests}
    arriving = list(requests)
    while arriving or not core.is_idle:
        for _ in range(rng.choice([0, 0, 0, 0, 1, 4])):
            if arriving:
                request = arriving.pop()
                core.add([request], [recorders[request.id]])
        if rng.random() < 0.02:
            core.cancel(rng.choice(requests).id)  # maybe not there yet, maybe ended
        if not core.is_idle:
            core.step()
        core.scheduler.check()
    assert core.scheduler.num_preemptions > 0
    for pool in (core.scheduler.pools.cache.open, core.scheduler.pools.cache.sealed):
        assert (pool.num_held, pool.num_available) == (0, pool.num_total)

    alone = tiny_core(model, **options)
    num_cancelled = 0
    for request in requests:
        (expected,) = run(alone, [request])
        ours = recorders[request.id]
        assert isinstance(ours.terminal, Finished)
        if ours.terminal.reason is FinishReason.CANCELLED:
            num_cancelled += 1
            assert expected.token_ids[: len(ours.token_ids)] == ours.token_ids
            assert expected.text.startswith(ours.text)
        else:
            assert ours.events == expected.events
    assert num_cancelled < len(requests) / 2
