"""Online softmax: attention over keys that arrive in blocks (Milakov & Gimelshein, arXiv 1805.02867)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Partial:
    """Attention over the keys seen so far: largest logit, sum of weights [..., M], weighted values [..., M, D]."""

    largest: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def over(cls, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> "Partial":
        """fp32 q [..., M, D] (scaled), k and v [..., N, D].

        `allowed` broadcasts to [..., M, n] and is about the last n keys; the others all are. Every row must be
        allowed at least one key.
        """
        logits = torch.matmul(q, k.transpose(-1, -2))
        if allowed is not None:
            logits[..., -allowed.shape[-1] :].masked_fill_(~allowed, float("-inf"))
        largest = logits.amax(-1)
        weights = logits.sub_(largest.unsqueeze(-1)).exp_()
        return cls(largest, weights.sum(-1), torch.matmul(weights, v))

    @classmethod
    def over_16bit(cls, q: Tensor, k: Tensor, v: Tensor) -> "Partial":
        """On a CPU: fp32 q [N, heads, M, D] (scaled), k and v [N, heads, n, D] in 16 bit, never copied to fp32."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        values, log_total = attend(q.to(k.dtype), k, v, scale=1.0)
        return cls(log_total, torch.ones_like(log_total), values.float())

    def merge(self, other: "Partial") -> "Partial":
        largest = torch.maximum(self.largest, other.largest)
        mine, theirs = (self.largest - largest).exp_(), (other.largest - largest).exp_()
        return Partial(
            largest,
            self.total * mine + other.total * theirs,
            self.values * mine.unsqueeze(-1) + other.values * theirs.unsqueeze(-1),
        )

    def add_splits(self, other: "Partial", row: Tensor) -> "Partial":
        """Merge splits [I, ...] into the rows [B, ...] that they belong to; `row` [I] says which."""
        index = row[:, None, None].expand_as(other.largest)
        largest = self.largest.scatter_reduce(0, index, other.largest, "amax")
        mine, theirs = (self.largest - largest).exp_(), (other.largest - largest[row]).exp_()
        return Partial(
            largest,
            (self.total * mine).index_add_(0, row, other.total * theirs),
            (self.values * mine.unsqueeze(-1)).index_add_(0, row, other.values * theirs.unsqueeze(-1)),
        )

    def output(self) -> Tensor:
        return self.values / self.total.unsqueeze(-1)
