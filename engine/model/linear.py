"""Matrix products with weights."""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Projection(Protocol):
    """A linear layer. Called with [rows, in] in the model's dtype or fp32; the result [rows, out] is in either.

    `num_bytes` is what its weights take.
    """

    num_bytes: int

    @property
    def weight(self) -> Tensor | None:
        """What it was made from; None where it keeps that in another order. Then the result is fp32."""

    def __call__(self, x: Tensor) -> Tensor: ...


MakeProjection = Callable[[Tensor, Tensor | None], Projection]
"""From a weight [out, in] and a bias [out] or None, both in the model's dtype and on its device."""


class PlainProjection:
    """PyTorch's own product."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self.weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self._bias)
