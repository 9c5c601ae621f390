"""Attention mass is summed in whole units, so that the order of sums is irrelevant."""

from itertools import islice

from torch import Tensor

UNIT = 2.0**-32


def mass_lists(sums: Tensor, counts: list[int]) -> list[list[float]]:
    """`AttentionBackend.mass` from `sums`, in units, of all pages: of each row or chunk as many as `counts` says."""
    values = (units * UNIT for units in sums.tolist())
    return [list(islice(values, count)) for count in counts]
