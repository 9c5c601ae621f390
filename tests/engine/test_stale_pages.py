"""What a page held before does not matter: pools full of NaN and of infinities give the tokens of clean ones."""

import math

import pytest

from tests.helpers import COVERING_RECIPES, TINY, TINY_QWEN2, greedy, pool_of, random_prompt, run, tiny_core

LENGTHS = (1, 32, 33, 95, 130)


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("recipe", COVERING_RECIPES)
def test_stale_contents_do_not_matter(recipe: str, batch_invariant: bool) -> None:
    outputs = []
    for stale in (0.0, math.nan, math.inf):
        core = tiny_core(
            TINY_QWEN2 if batch_invariant else TINY,
            kv_format=recipe,
            batch_invariant=batch_invariant,
            max_step_tokens=64,
            kv_memory=2 * 2**20,
        )
        pool = pool_of(core)
        pool.open[1:] = stale  # but the null slot and the null page
        pool.sealed[1:] = 0 if stale == 0 else 255
        batch = [greedy(f"r{i}", random_prompt(i, length), 34) for i, length in enumerate(LENGTHS)]
        outputs.append([recorder.token_ids for recorder in run(core, batch)])
    assert outputs[1] == outputs[0] and outputs[2] == outputs[0]
    assert len({token for tokens in outputs[0] for token in tokens}) > 30
