"""Matrix products with weights."""

from collections.abc import Callable
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Projection(Protocol):
    """A linear layer. Called with [rows, in] in the model's dtype or fp32; the result [rows, out] is in either.

    `num_bytes` is what its weights take; `copies`: it does not keep the tensors that it was made from.
    """

    num_bytes: int
    copies: bool

    def __call__(self, x: Tensor) -> Tensor: ...


MakeProjection = Callable[[Tensor, Tensor | None], Projection]
"""From a weight [out, in] and a bias [out] or None, both in the model's dtype and on its device."""


class PlainProjection:
    """PyTorch's own product."""

    copies = False

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)
