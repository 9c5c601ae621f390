"""Matrix products with weights, the way that suits the processor."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`linear(x [rows, in], weight [out, in], bias [out] or None)` to [rows, out]; x and weight in the model's dtype."""

WIDE_ROWS = 128  # from here on the conversion of the weights is paid back
SLICE_ROWS = 4096  # weight rows converted at a time, so that the copy stays small


def widened(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Many rows in fp32 (the result too), few rows as they are.

    Without matrix units (AMX) a processor multiplies bf16 at half the speed of fp32 or less: 82 against 162 GFLOPS a
    core, measured. Few rows are bound by the bytes of the weights instead, and bf16 has half of them.
    """
    if len(x) < WIDE_ROWS:
        return F.linear(x, weight, bias)
    wide = x.float()
    parts = [F.linear(wide, part.float()) for part in torch.split(weight, SLICE_ROWS)]
    product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return product if bias is None else product.add_(bias)


def choose_linear(device: torch.device, dtype: torch.dtype, *, is_invariant: bool) -> Linear:
    """`widened` for 16-bit weights on a CPU without matrix units; it depends on the number of rows, so never where
    results must not."""
    if device.type != "cpu" or dtype == torch.float32 or is_invariant:
        return F.linear
    return F.linear if torch.cpu.get_capabilities().get("amx_tile") else widened
