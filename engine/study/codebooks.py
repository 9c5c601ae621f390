"""Codebooks for `Table` codecs: KVQuant's nuq (arXiv 2401.18079, sections 3.3 and 3.5). No torch.

Numbers come normalised to [-1, 1] with a weight each. KVQuant weighs by the Fisher information of the number times the
square of its scale: how much the loss minds an error there. One-dimensional k-means is solved exactly by dynamic
programming (Wang and Song, "Ckmeans.1d.dp", 2011), over bins that are far narrower than what a code stands for; so
there is nothing to initialise, and one pass serves all numbers of codes.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kernels.format.codec import Table

NUM_BINS = 512
Array = NDArray[np.float64]


class Histogram:
    """Numbers on [-1, 1] in bins: their count and sums, and the same weighted."""

    def __init__(self) -> None:
        self._bins = np.zeros((5, NUM_BINS))

    def add(self, numbers: NDArray[np.float32], weights: NDArray[np.float32]) -> None:
        """Two arrays of one shape. Numbers beyond the range are taken for its ends."""
        x = np.clip(numbers.ravel().astype(np.float64), -1, 1)
        w = weights.ravel().astype(np.float64)
        place = np.minimum(((x + 1) / 2 * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        for row, values in enumerate((np.ones_like(x), x, w, w * x, w * x * x)):
            self._bins[row] += np.bincount(place, values, NUM_BINS)

    @property
    def weighted(self) -> tuple[Array, Array, Array]:
        """Weight, mean and weighted sum of squares of each bin that has weight. Without any, all numbers weigh 1."""
        count, total, weight, weighted, squares = self._bins
        if not (weight > 0).any():
            weight, weighted = count, total
            squares = total**2 / np.maximum(count, 1)
        is_full = weight > 0
        return weight[is_full], (weighted / np.maximum(weight, 1e-300))[is_full], squares[is_full]

    @property
    def plain(self) -> tuple[Array, Array]:
        """Count and mean of each bin that has numbers."""
        count, total = self._bins[:2]
        is_full = count > 0
        return count[is_full], total[is_full] / count[is_full]


def fit(histogram: Histogram, bits: Iterable[int], name: str = "nuq") -> dict[int, Table]:
    """The table of each number of bits. With 2 bits the decoded values are moved so that mean and spread stay what they
    were (Q-Norm), while codes are chosen as without."""
    weight, mean, squares = histogram.weighted
    sizes = {count: 1 << count for count in bits}
    means = cluster_means(weight, mean, squares, sizes.values())
    tables = {}
    for count, size in sizes.items():
        values = _distinct(means[size], size)
        table = Table.nearest(tuple(values.tolist()), name=name)
        if count == 2:
            table = Table(_q_norm(table, *histogram.plain), table.bounds, name=name)
        tables[count] = table
    return tables


def cluster_means(weight: Array, mean: Array, squares: Array, sizes: Iterable[int]) -> dict[int, Array]:
    """For each k of `sizes` the means of the k clusters of least weighted squared error, ascending; fewer than k where
    there are fewer points. `weight`, `mean` and `squares` (the weighted sum of squares) are of ascending points."""
    first = np.zeros(len(weight) + 1), np.zeros(len(weight) + 1), np.zeros(len(weight) + 1)
    for total, part in zip(first, (weight, weight * mean, squares), strict=True):
        total[1:] = np.cumsum(part)
    # error[i, j]: of one cluster of points i .. j-1
    w, s, q = (total[None, :] - total[:, None] for total in first)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(w > 0, np.maximum(q - s * s / w, 0), np.inf)
    np.fill_diagonal(error, 0)
    wanted = set(sizes)
    best, cuts, found = error[0].copy(), [np.zeros(len(weight) + 1, np.int64)], {}
    for size in range(1, max(wanted) + 1):
        if size > 1:
            reached = best[:, None] + error
            cuts.append(reached.argmin(0))
            best = reached.min(0)
        if size in wanted:
            found[size] = _means(first[0], first[1], cuts[:size])
    return found


def _means(weights: Array, sums: Array, cuts: list[NDArray[np.int64]]) -> Array:
    ends = [len(weights) - 1]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    edges = sorted(set(ends))
    return np.array([(sums[b] - sums[a]) / (weights[b] - weights[a]) for a, b in zip(edges, edges[1:], strict=False)])


def _distinct(means: Array, size: int) -> Array:
    """`size` ascending fp16 numbers: those given, and where they are fewer, middles of the widest gaps."""
    values = np.unique(means.astype(np.float16).astype(np.float64))
    while len(values) < size:
        edges = np.unique(np.concatenate(([-1.0], values, [1.0])))
        widest = int(np.diff(edges).argmax())
        middle = np.float64(np.float16((edges[widest] + edges[widest + 1]) / 2))
        values = np.unique(np.append(values, middle))
    return values


def _q_norm(table: Table, count: Array, mean: Array) -> tuple[float, ...]:
    """Values moved and stretched so that decoded numbers have the mean and spread of the numbers themselves."""
    values = np.array(table.values)
    decoded = values[np.searchsorted(np.array(table.bounds), mean)]
    mean1, mean2 = (np.average(x, weights=count) for x in (mean, decoded))
    spread1, spread2 = (
        np.sqrt(np.average((x - middle) ** 2, weights=count)) for x, middle in ((mean, mean1), (decoded, mean2))
    )
    if spread2 == 0 or spread1 == 0:
        return table.values
    stretched = (values - mean2) * (spread1 / spread2) + mean1
    return tuple(_distinct(stretched, len(values)).tolist())
