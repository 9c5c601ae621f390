"""Numbers as a record holds them, written out slowly for the oracle: packed codes, float8, scales, 16-bit rows."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.format.codec import Float8

Array = NDArray[Any]

SMALLEST, LARGEST = np.float32(2.0**-14), np.float32(65504.0)  # normal numbers of fp16


def plane_places(length: int, bits: int) -> tuple[Array, Array]:
    """(byte, lowest bit) of each of `length` codes in a packed row: byte `j` holds `j, j + L/n, …`, lowest first."""
    element = np.arange(length)
    row_bytes = length * bits // 8
    return element % row_bytes, (element // row_bytes * bits).astype(np.uint8)


def pack_row(codes: Array, bits: int) -> Array:
    """uint8 [..., L] to uint8 [..., L * bits / 8]. Three bits: a row of the two low ones, then one of the high one."""
    if bits == 3:
        return np.concatenate([pack_row(codes % 4, 2), pack_row(codes // 4, 1)], axis=-1)
    length = codes.shape[-1]
    packed = np.zeros((*codes.shape[:-1], length * bits // 8), np.uint8)
    for element, (byte, shift) in enumerate(zip(*plane_places(length, bits), strict=True)):
        packed[..., byte] |= codes[..., element] << shift
    return packed


def unpack_row(packed: Array, bits: int) -> Array:
    """uint8 [..., B] to uint8 [..., B * 8 / bits]."""
    if bits == 3:
        middle = packed.shape[-1] * 2 // 3
        return np.asarray(unpack_row(packed[..., :middle], 2) + 4 * unpack_row(packed[..., middle:], 1))
    byte, shift = plane_places(packed.shape[-1] * 8 // bits, bits)
    return np.asarray(packed[..., byte] >> shift) & ((1 << bits) - 1)


def float8_values(codec: Float8) -> Array:
    """The float64 numbers of the 256 codes: sign, exponent, mantissa. No code of a record is an infinity or NaN, so
    those of the format get the finite value that they would have without that rule."""
    code = np.arange(256)
    mantissa = code % 2**codec.mantissa_bits / 2**codec.mantissa_bits
    exponent = code % 128 // 2**codec.mantissa_bits
    bias = 2 ** (codec.exponent_bits - 1) - 1
    magnitude: Array = np.where(exponent == 0, 2 * mantissa, 1 + mantissa) * 2.0 ** (exponent - bias)
    return np.where(code < 128, magnitude, -magnitude)


def nearest_even(x: Array) -> Array:
    """Integers nearest to `x`; halves to the even one."""
    below, rest = np.floor(x), x - np.floor(x)
    return np.where((rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)), below + 1, below)


def nearest_float8(x: Array, codec: Float8) -> Array:
    """uint8 codes of the numbers nearest to `x` (|x| <= max_code); ties to the even code, signed zeros kept."""
    values = float8_values(codec)[:128]
    magnitude = np.abs(x.astype(np.float64))
    above = np.minimum(np.searchsorted(values, magnitude), 127)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - magnitude, magnitude - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.signbit(x), code + 128, code).astype(np.uint8)


def stored_scale(x: Array) -> Array:
    """To fp16, away from zero and infinity."""
    return np.clip(x, SMALLEST, LARGEST).astype(np.float16)


# 8-bit scales: four bits of exponent (bias 15, zero: subnormal) and four of mantissa
BYTE_SCALES = np.array(
    [(1 + m / 16) * 2.0 ** (e - 15) if e else m / 16 * 2.0**-14 for e in range(16) for m in range(16)]
)


def byte_scale(x: Array) -> Array:
    """uint8 codes of the 8-bit scales nearest to fp32 `x` rounded to fp16, halves up; never that of zero."""
    half = np.minimum(x, np.float32(1.9375)).astype(np.float16).astype(np.float64)
    middles = (BYTE_SCALES[:-1] + BYTE_SCALES[1:]) / 2
    return np.maximum(np.searchsorted(middles, half, side="right"), 1).astype(np.uint8)


def raw_bytes(x: Array, dtype: str) -> Array:
    """fp32 `x`, already rounded to `dtype`, as bytes."""
    if dtype == "bfloat16":  # the upper half of fp32
        return np.ascontiguousarray(x, np.float32).view(np.uint16).reshape(-1, 2)[:, 1].copy().view(np.uint8)
    return np.ascontiguousarray(x, dtype).view(np.uint8).ravel()


def raw_values(data: Array, dtype: str) -> Array:
    """The inverse of `raw_bytes`, float64 [n]."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)
