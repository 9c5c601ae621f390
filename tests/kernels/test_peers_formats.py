"""The arithmetic of other programs' formats, each in a few lines written from what they document, against pages of the
torch backend."""

import itertools

import numpy as np
import pytest

from kernels.format.codec import Float8, Integer, Parameters, Quantizer, Symmetric, per_channel, per_token
from kernels.format.named import E2M1, RECIPES
from kernels.format.recipe import LayerRecipe
from tests.kernels.papers import (
    Array,
    D,
    Method,
    P,
    assert_equal_but_for_rounding,
    ends,
    half,
    in_8_bits,
    in_blocks,
    keys,
    numbers,
    stored,
    stored_k,
    stored_v,
    values,
)

SMALLEST_SCALE = np.float32(2.0**-14)  # ours


def to_float8(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """The nearest number of the format up to 448, from all there are; ties to the even code."""
    codes, bias = np.arange(2 ** (exponent_bits + mantissa_bits)), 2 ** (exponent_bits - 1) - 1
    power, part = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    normal = (2**mantissa_bits + part) * 2.0 ** (power - bias - mantissa_bits)
    grid = np.where(power == 0, part * 2.0 ** (1 - bias - mantissa_bits), normal)
    grid = grid[grid <= 448]
    size = np.minimum(np.abs(x), 448)
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    middle = (grid[above - 1] + grid[above]) / 2
    goes_up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return (np.sign(x) * np.where(goes_up, grid[above], grid[above - 1])).astype(np.float32)


def scaled_float8(blocks: Array, *format: int) -> Array:
    scale = np.maximum(half(np.abs(blocks).max(1, keepdims=True) / np.float32(448)), SMALLEST_SCALE)
    return to_float8(blocks / scale, *format) * scale


@pytest.mark.parametrize("format, name", [((4, 3), "fp8_e4m3"), ((5, 2), "fp8_e5m2")])
def test_float8(format: tuple[int, int], name: str):
    k, v = keys(), values()
    actual_k, actual_v = stored(RECIPES[name](False), k, v)
    assert_equal_but_for_rounding(actual_k, in_blocks(k, P, 1, lambda x: scaled_float8(x, *format)), k, 1)
    assert_equal_but_for_rounding(actual_v, in_blocks(v, 1, D, lambda x: scaled_float8(x, *format)), v, 2)
    actual_k, actual_v = stored(
        RECIPES[f"{name}_unit"](False), k, v
    )  # as other servers cast, but for numbers above 448
    assert np.array_equal(actual_k, to_float8(k, *format)) and np.array_equal(actual_v, to_float8(v, *format))


def lmdeploy(blocks: Array, bits: int) -> Array:
    """Scale, and zero as a real number of codes: (code - zero) * scale. Both are fp16 there; ours keeps the minimum in
    fp16, which says the same."""
    low, high = ends(blocks)
    scale = np.maximum(half((high - low) / np.float32(2**bits - 1)), SMALLEST_SCALE)
    zero = -half(low).astype(float) / scale
    return (np.clip(np.rint(blocks / scale.astype(float) + zero), 0, 2**bits - 1) - zero) * scale


def hf(blocks: Array, bits: int = 4) -> Array:
    """quanto's default of QuantizedCache: axis 0 with groups of 64 makes rows of 64 consecutive numbers, which are
    channels of one token of K and of V alike; scale = range / 15, shift = -min."""
    low, high = ends(blocks)
    scale = np.maximum(half((high - low) / np.float32(2**bits - 1)), SMALLEST_SCALE)
    codes = np.clip(np.rint((blocks - half(low)) / scale), 0, 2**bits - 1) - 2 ** (bits - 1)
    return (codes + 2 ** (bits - 1)) * scale - half(-low)


@pytest.mark.parametrize("name, bits", [("token8", 8), ("token4", 4)])
def test_by_token(name: str, bits: int):
    k, v = values(), numbers(*values().shape, seed=3)
    actual = stored(RECIPES[name](False), k, v)
    for x, read in zip((k, v), actual, strict=True):
        assert_equal_but_for_rounding(read, in_blocks(x, 1, D, lambda y: lmdeploy(y, bits)), x, 2)


def test_hugging_face_by_token_in_groups_of_64():
    k, v = values(), numbers(*values().shape, seed=3)
    store = per_token(Integer(4), 64)
    for x, read in zip((k, v), stored(LayerRecipe(store, store), k, v), strict=True):
        assert_equal_but_for_rounding(read, in_blocks(x, 1, 64, hf), x, 2)


def q8_0(blocks: Array) -> Array:
    """llama.cpp rounds ties away from zero, and divides by the scale before that is rounded to fp16; ours divides by
    what is stored, ties to even."""
    scale = np.maximum(half(np.abs(blocks).max(1, keepdims=True) / np.float32(127)), SMALLEST_SCALE)
    steps = blocks / scale
    return np.clip(np.sign(steps) * np.floor(np.abs(steps) + 0.5), -128, 127) * scale


def q4_0(blocks: Array) -> Array:
    """The number of largest magnitude becomes -8 steps, so the scale has the other sign."""
    low, high = ends(blocks)
    scale = half(np.where(-low >= high, low, high) / np.float32(-8))
    scale = np.where(np.abs(scale) < SMALLEST_SCALE, np.copysign(SMALLEST_SCALE, scale), scale)
    return (np.clip(np.floor(blocks / scale + np.float32(8.5)), 0, 15) - 8) * scale


@pytest.mark.parametrize("method, bits", [(q8_0, 8), (q4_0, 4)])
def test_llama_cpps_blocks(method: Method, bits: int):
    k, v = (x * np.float32(2**-0.5) for x in (values(), numbers(*values().shape, seed=3)))  # so that there are no ties
    layer = RECIPES[f"q{bits}_0"](False)
    assert layer.rotate_k and layer.rotate_v  # by the model, before pages are sealed
    for x, read in zip((k, v), stored(layer, k, v), strict=True):
        assert_equal_but_for_rounding(read, in_blocks(x, 1, 32, method), x, 2)


def test_ties_of_llama_cpps_blocks_go_to_the_even_code():
    x = np.repeat((np.arange(D, dtype=np.float32) / 2 - 8)[None, None], P, 1)  # halves from -8 to 23.5
    x[..., 0], x[..., 32] = -127, -8  # scales of exactly 1
    x[..., 33:] /= 4
    x[..., 33:] = np.rint(x[..., 33:] * 2) / 2
    read = stored_v(per_token(Symmetric(8), 32), x)
    assert np.array_equal(read[..., 1:32], np.rint(x[..., 1:32]))
    assert np.array_equal(q8_0(x[0, :1, :32])[0, 1:4], [-8, -7, -7]) and np.array_equal(read[0, 0, 1:4], [-8, -7, -6])
    read = stored_v(per_token(Symmetric(4), 32), x)
    assert np.array_equal(read[..., 32:], np.clip(np.rint(x[..., 32:]), -8, 7))


def nvfp4(blocks: Array) -> Array:
    """E2M1 in blocks of 16, the largest of which becomes 6. Scales are e4m3 under an fp32 factor for the tensor there;
    here they have no sign but a bit more, under an fp16 factor for the head."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    largest = np.abs(blocks).max(1, keepdims=True)
    factor = np.maximum(half(largest.max() / np.float32(1.9375)), SMALLEST_SCALE)
    scale = in_8_bits(np.minimum(largest / factor, np.float32(1.9375))).astype(float) * factor / 6
    places = np.abs(np.abs(blocks / scale)[..., None] - grid).argmin(-1)
    return np.sign(blocks) * grid[places] * scale


def test_nvfp4():
    k, v = values(), numbers(*values().shape, seed=3)
    for x, read in zip((k, v), stored(RECIPES["nvfp4"](False), k, v), strict=True):
        assert_equal_but_for_rounding(read, in_blocks(x, 1, 16, nvfp4), x, 2)
    assert [round(value * 6, 5) for value in E2M1.values[7:]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


HALF, BYTE = Parameters.HALF, Parameters.BYTE


@pytest.mark.parametrize(
    "codec, parameters",
    [
        (Symmetric(4), HALF),
        *itertools.product([Symmetric(8), Float8(4, 3), Float8(5, 2), E2M1], [HALF, BYTE]),
    ],
    ids=str,
)
def test_zeros_stay_zero_and_constants_stay_near(codec: Quantizer, parameters: Parameters):
    x = np.zeros((1, P, D), np.float32)
    assert not stored_k(per_channel(codec, None, parameters), x).any()
    x += np.array([0.01, -3, 5000, 17])[np.arange(D) % 4]
    read = stored_k(per_channel(codec, None, parameters), x)
    assert (np.abs(read - x) <= np.abs(x) / 8).all()
