"""Matrix products with weights, the way that suits the processor (figures in docs/log.md)."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

WIDE_ROWS = 192  # from here on converting the weights to fp32 is paid back


class Projection(Protocol):
    """A linear layer. Called with [rows, in] in the model's dtype; the result [rows, out] may be fp32.

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
        return F.linear(x, self._weight, self._bias)


class PackedProjection:
    """bf16 weights in oneDNN's blocked order, for a CPU that multiplies bf16 but has no matrix units (AMX).

    Few rows are bound by reading the weights, which the blocked order makes up to twice as fast, with equal results.
    Many rows are multiplied in fp32, which takes half the time of bf16 on such a CPU.
    """

    copies = True

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < WIDE_ROWS:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return product
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._packed.to_dense(torch.float32), bias)


def choose_projection(device: torch.device, dtype: torch.dtype, *, is_invariant: bool) -> MakeProjection:
    """`PackedProjection` where it pays; its sums depend on the number of rows, so never where results must not."""
    if device.type != "cpu" or dtype != torch.bfloat16 or is_invariant:
        return PlainProjection
    if torch.cpu.get_capabilities().get("amx_tile") or not torch.backends.mkldnn.is_available():
        return PlainProjection
    return PackedProjection if torch.ops.mkldnn._is_mkldnn_bf16_supported() else PlainProjection
