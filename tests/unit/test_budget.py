"""The choice under a budget against all choices there are."""

import itertools

import numpy as np
import pytest

from engine.study.budget import choose


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_that_fits(seed: int) -> None:
    generator = np.random.default_rng(seed)
    costs = [generator.integers(1, 20, 4).tolist() for _ in range(5)]
    losses = [generator.exponential(size=4).tolist() for _ in range(5)]
    cheapest = sum(min(item) for item in costs)
    for budget in (cheapest, cheapest + 7, cheapest + 25, 1000):
        picks = choose(costs, losses, budget)
        assert picks is not None
        assert sum(item[pick] for item, pick in zip(costs, picks, strict=True)) <= budget
        found = sum(item[pick] for item, pick in zip(losses, picks, strict=True))
        best = min(
            sum(loss for _, loss in choice)
            for choice in itertools.product(*(zip(c, x, strict=True) for c, x in zip(costs, losses, strict=True)))
            if sum(cost for cost, _ in choice) <= budget
        )
        assert found == pytest.approx(best)


def test_a_budget_below_the_cheapest_is_none() -> None:
    assert choose([[16, 32], [48, 16]], [[1.0, 0.0], [0.0, 1.0]], 31) is None
    assert choose([[16, 32], [48, 16]], [[1.0, 0.0], [0.0, 1.0]], 32) == [0, 1]
