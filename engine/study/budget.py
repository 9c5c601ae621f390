"""One option for each item, so that the costs add up to a budget at most and the losses to the least. No torch."""

from collections.abc import Sequence
from math import gcd

import numpy as np


def choose(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]], budget: int) -> list[int] | None:
    """The place of the chosen option of each item; None where even the cheapest ones exceed the budget.

    The multiple-choice knapsack problem, solved exactly by dynamic programming over costs in units of what divides them
    all.
    """
    cheapest = [min(item) for item in costs]
    room = budget - sum(cheapest)
    if room < 0:
        return None
    extra = [[cost - least for cost in item] for item, least in zip(costs, cheapest, strict=True)]
    unit = gcd(*(cost for item in extra for cost in item)) or 1
    size = room // unit + 1
    best = np.zeros(size)  # best[c]: least loss of the items so far with extra costs of at most c units
    chosen = []
    for item_costs, item_losses in zip(extra, losses, strict=True):
        reached = np.full((len(item_costs), size), np.inf)
        for place, (cost, loss) in enumerate(zip(item_costs, item_losses, strict=True)):
            start = cost // unit
            if start < size:
                reached[place, start:] = best[: size - start] + loss
        picks = reached.argmin(0)
        chosen.append(picks.astype(np.uint8 if len(item_costs) < 256 else np.int32))
        best = reached[picks, np.arange(size)]
    places, left = [], size - 1
    for item_costs, picks in zip(reversed(extra), reversed(chosen), strict=True):
        place = int(picks[left])
        places.append(place)
        left -= item_costs[place] // unit
    return places[::-1]
