"""Attention mass: the softmax weight that observed queries give to a page, summed over layers, heads and queries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.format.step import AttentionStep
from kernels.mass import UNIT
from kernels.torch_backend.softmax import Partial


def exact_sum(shares: Tensor, dims: tuple[int, ...]) -> Tensor:
    """fp64 sums, in units, of fp32 `shares` in [0, 1], which are changed to whole units in place: in fp64 these add up
    without rounding, so that their order is irrelevant, as long as a sum of shares is below 2^21."""
    return shares.mul_(1 / UNIT).round_().sum(dims, dtype=torch.float64)


class PageMass:
    """The mass of a step's observed rows and chunks, added to on the device while layers are attended to.

    Sums are fp64, in units.
    """

    def __init__(self, step: AttentionStep, device: torch.device):
        self.counts = [len(row.pages) if row.is_observed else 0 for row in step.decode]
        self.counts += [len(c.context) + len(c.targets) if c.num_observed else 0 for c in step.chunks]
        self.sums = torch.zeros(sum(self.counts), dtype=torch.float64, device=device)

    def part(self, start: int, end: int) -> Tensor | None:
        """[n] view for the pages of rows and chunks `start` to `end` that are observed; None if none are."""
        count = sum(self.counts[start:end])
        first = sum(self.counts[:start]) if count else 0
        return self.sums[first : first + count] if count else None


@dataclass(frozen=True, slots=True)
class DecodeMass:
    """`items` [n]: the splits of observed rows, by row and page; `row` [n]: whose they are; `sums` fp64 [n]."""

    items: Tensor
    row: Tensor
    sums: Tensor

    def add(self, totals: Tensor, rows: Partial) -> None:
        """What `Partial.combine` gives for one layer."""
        shares = totals.index_select(0, self.items) / rows.total.index_select(0, self.row)
        self.sums.add_(exact_sum(shares, (1, 2)))


class ChunkMass:
    """Adds one layer of a chunk to `sums` fp64 [pages]: queries [kv_heads, M, D] from `first` on are observed."""

    def __init__(self, sums: Tensor, first: int, page_tokens: int):
        self._sums = sums
        self._first = first
        self._page_tokens = page_tokens
        self._context: list[tuple[Tensor, Tensor]] = []
        self._own: tuple[Tensor, Tensor]

    def _by_page(self, weights: Tensor) -> Tensor:
        """[..., tokens] to [..., pages]; the last page may be partial."""
        padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % self._page_tokens))
        totals: Tensor = padded.unflatten(-1, (-1, self._page_tokens)).sum(-1)
        return totals

    def see_context(self, largest: Tensor, weights: Tensor) -> None:
        """All queries over the next pages before the chunk."""
        self._context.append((largest[:, self._first :], self._by_page(weights[:, self._first :])))

    def see_own(self, largest: Tensor, weights: Tensor) -> None:
        """One page of queries over the chunk's own pages up to theirs."""
        self._own = largest, weights

    def add(self, queries: slice, whole: Partial) -> None:
        """`queries` are those that `see_own` saw last, and `whole` is what they see in all pages."""
        first = max(queries.start, self._first)
        if first >= queries.stop:
            return
        observed = slice(first - self._first, queries.stop - self._first)
        blocks = [(largest[:, observed], totals[:, observed]) for largest, totals in self._context]
        inside = slice(first - queries.start, None)
        largest, weights = self._own
        blocks.append((largest[:, inside], self._by_page(weights[:, inside])))
        result = whole.at(inside)
        shares = torch.cat([totals * result.share(largest).unsqueeze(-1) for largest, totals in blocks], -1)
        self._sums[: shares.shape[-1]] += exact_sum(shares, (0, 1))
