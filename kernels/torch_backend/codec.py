"""Quantize and dequantize K or V tiles of whole pages, vectorised over pages.

A tile is [N pages, kv_heads, P tokens, D channels]. Parameters are taken over `dim`: -2 (tokens) for K, -1 (channels)
for V. Rounding is to nearest even, against the parameters *as stored*.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.format.recipe import Codec, Float8, Integer, Raw

SMALLEST_NORMAL = 2.0**-14
LARGEST = 65504.0  # of fp16


class Quantized(NamedTuple):
    """Unpacked uint8 codes in the tile's shape; fp16 scale and zero in its shape without `dim`."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def float8_dtype(codec: Float8) -> torch.dtype:
    return torch.float8_e5m2 if codec.exponent_bits == 5 else torch.float8_e4m3fn


def to_scale(scale: Tensor) -> Tensor:
    """Rounds to fp16 away from zero and infinity: a constant range still divides, and never makes NaN."""
    return scale.clamp(SMALLEST_NORMAL, LARGEST).half()


def quantize(x: Tensor, codec: Integer | Float8, dim: int) -> Quantized:
    """`x`: fp32 tile. Returns codes and the parameters that `dequantize` needs."""
    if isinstance(codec, Float8):
        scale = to_scale(x.abs().amax(dim) / codec.max_code)
        scaled = (x / scale.float().unsqueeze(dim)).clamp(-codec.max_code, codec.max_code)
        return Quantized(scaled.to(float8_dtype(codec)).view(torch.uint8), scale, None)
    low, high = x.aminmax(dim=dim)
    zero = low.clamp(-LARGEST, LARGEST).half()
    scale = to_scale((high - low) / codec.max_code)
    codes = (x - zero.float().unsqueeze(dim)).div_(scale.float().unsqueeze(dim)).round_()
    return Quantized(codes.clamp_(0, codec.max_code).to(torch.uint8), scale, zero)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | None, dim: int) -> Tensor:
    """Codes as fp32 numbers to an fp32 tile; `scale` and `zero` lack axis `dim`."""
    scale = scale.float().unsqueeze(dim)
    return codes * scale if zero is None else torch.addcmul(zero.float().unsqueeze(dim), codes, scale)


def code_bits(codec: Codec) -> int:
    assert not isinstance(codec, Raw)
    return codec.bits if isinstance(codec, Integer) else 8
