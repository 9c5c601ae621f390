"""Codes of fewer than 8 bits, packed in planes (docs/kv_layout.md).

With `b` bits there are `n = 8 / b` planes: byte `j` of a row of length `L` holds the elements `j, j + L/n, …`, the
first in the lowest bits, so that a kernel does `n` dots of depth `L/n` and never interleaves. Three bits are the planes
of the two low bits, then those of the high one.
"""

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., L] below `2**bits` to packed bytes [..., L * bits / 8]."""
    if bits == 8:
        return codes
    if bits == 3:
        return torch.cat([pack(codes & 3, 2), pack(codes >> 2, 1)], dim=-1)
    planes = codes.chunk(8 // bits, dim=-1)
    packed = planes[0].clone()
    for index, plane in enumerate(planes[1:], start=1):
        packed |= plane << (bits * index)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], dim=-1)
        return unpack(low, 2) | unpack(high, 1) << 2
    mask = 2**bits - 1
    return torch.cat([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-1)
