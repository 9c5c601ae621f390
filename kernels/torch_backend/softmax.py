"""Online softmax: attention over keys that arrive in blocks (Milakov & Gimelshein, arXiv 1805.02867)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Observe = Callable[[Tensor, Tensor], None]


@dataclass(slots=True)
class Partial:
    """Attention over the keys seen so far: largest logit, sum of weights [..., M], weighted values [..., M, D]."""

    largest: Tensor
    total: Tensor
    values: Tensor

    @property
    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.largest, self.total, self.values

    @classmethod
    def over(
        cls, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None, *, observe: Observe | None = None
    ) -> "Partial":
        """fp32 q [..., M, D] (scaled), k and v [..., N, D].

        `hidden` broadcasts to [..., M, n] and says which of the last n keys a row must not see; it sees all others.
        Every row must see at least one key. `observe` is given the largest logits [..., M] and the weights
        exp(logit - largest) [..., M, N].
        """
        logits = torch.matmul(q, k.transpose(-1, -2))
        if hidden is not None:
            logits[..., -hidden.shape[-1] :].masked_fill_(hidden, float("-inf"))
        largest = logits.amax(-1)
        weights = logits.sub_(largest.unsqueeze(-1)).exp_()
        if observe is not None:
            observe(largest, weights)
        return cls(largest, weights.sum(-1), torch.matmul(weights, v))

    @classmethod
    def over_16bit(cls, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> "Partial":
        """On a CPU: fp32 q [N, heads, M, D] (scaled), k and v [N, heads, n, D] in 16 bit, never copied to fp32.

        fp32 `bias` [N, 1, 1, n] is added to the logits.
        """
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        values, log_total = attend(q.to(k.dtype), k, v, attn_mask=bias, scale=1.0)
        return cls(log_total, torch.ones_like(log_total), values.float())

    def merge(self, other: "Partial") -> "Partial":
        largest = torch.maximum(self.largest, other.largest)
        mine, theirs = (self.largest - largest).exp_(), (other.largest - largest).exp_()
        return Partial(
            largest,
            self.total * mine + other.total * theirs,
            self.values * mine.unsqueeze(-1) + other.values * theirs.unsqueeze(-1),
        )

    @classmethod
    def combine(cls, parts: Sequence["Partial"], row: Tensor, num_rows: int) -> tuple["Partial", Tensor]:
        """Merge the splits [I, heads, M] of all parts into rows [num_rows, heads, M]; `row` [I] says whose they are.

        Also gives [I, heads, M]: what each split contributes to its row's `total`.
        """
        largest, total, values = parts[0].fields
        if len(parts) > 1:
            largest, total, values = (
                torch.cat(tensors) for tensors in zip(*(part.fields for part in parts), strict=True)
            )
        bound = largest.new_full((num_rows, *largest.shape[1:]), float("-inf"))
        bound.scatter_reduce_(0, row[:, None, None].expand_as(largest), largest, "amax")
        weight = (largest - bound.index_select(0, row)).exp_()
        rows = cls(
            bound,
            torch.zeros_like(bound).index_add_(0, row, total.mul_(weight)),
            values.new_zeros(num_rows, *values.shape[1:]).index_add_(0, row, values.mul_(weight.unsqueeze(-1))),
        )
        return rows, total

    def at(self, queries: slice) -> "Partial":
        """Of the M queries, these."""
        return Partial(self.largest[..., queries], self.total[..., queries], self.values[..., queries, :])

    def share(self, largest: Tensor) -> Tensor:
        """What turns a weight relative to `largest` (broadcast to [..., M]) into its part of all weights seen."""
        return (largest - self.largest).exp_() / self.total

    def output(self) -> Tensor:
        return self.values / self.total.unsqueeze(-1)
