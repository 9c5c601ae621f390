"""Sealed records of the torch backend against the oracle's, bit for bit, and what they keep of the values."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.codec import Float8, Integer, Parameters, Store, Symmetric, Table
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.named import RECIPE_NAMES
from kernels.format.step import AttentionStep, PrefillChunk
from kernels.reference import PageReader, encode_page, token_norms
from kernels.reference_numbers import float8_values, nearest_float8
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.pages import LayerPages, PageIndex
from tests.kernels.builders import ODD_RECIPES, assert_same_record, make_layout, rotary, same_bits, stored_norms

QUANTIZED = [name for name in RECIPE_NAMES if name != "native" and "unit" not in name]
Random = Callable[..., Tensor]


def ties(random: Random, shape: tuple[int, ...]) -> Tensor:
    """Halves from 0 to 15, both ends in every row and column: with 4 bits every second value is a tie."""
    x = (random(*shape).abs() * 10).round().clamp(0, 30) / 2
    x[..., 0, :], x[..., 1, :] = 0, 15
    x[..., 2:, 0], x[..., 2:, 1] = 0, 15
    return x


KINDS: dict[str, Callable[[Random, tuple[int, ...]], Tensor]] = {
    "random": lambda random, shape: random(*shape) * 3,
    "constant": lambda random, shape: torch.full(shape, 1.7),
    "zero": lambda random, shape: torch.zeros(shape),
    "outlier": lambda random, shape: random(*shape).index_put_((torch.tensor(0),) * 4, torch.tensor(300.0)),
    "offset": lambda random, shape: random(*shape) * 20 + 30000,
    "tiny range": lambda random, shape: 1 + (random(*shape) > 0) / 128,
    "negative": lambda random, shape: -random(*shape).abs() - 0.5,
    "fp16 subnormal": lambda random, shape: random(*shape) * 1e-6,
    "fp32 subnormal": lambda random, shape: random(*shape) * 1e-40,
    "ties": ties,
    "beyond fp16": lambda random, shape: random(*shape) * 1e6,
    "near fp32's end": lambda random, shape: random(*shape).clamp(-3, 3) * 1e38,
    "constant near fp32's end": lambda random, shape: torch.full(shape, 3e38),
}
IN_RANGE = [kind for kind in KINDS if "beyond" not in kind and "end" not in kind]

# (recipe, head_dim, page_tokens, kv_heads, dtype): every recipe, head size, page size and both head counts
SHAPES = [
    ("int8", 64, 64, 8, "bfloat16"),
    ("int8", 80, 32, 1, "float32"),
    ("int4", 64, 64, 1, "bfloat16"),
    ("int4", 128, 128, 8, "float32"),
    ("int4", 96, 32, 8, "bfloat16"),
    ("int4", 16, 64, 1, "float32"),
    ("fp8_e5m2", 96, 64, 1, "float32"),
    ("fp8_e5m2", 16, 32, 8, "bfloat16"),
    ("fp8_e4m3", 80, 128, 1, "bfloat16"),
    ("fp8_e4m3", 128, 32, 8, "float32"),
    ("kivi4", 64, 64, 8, "float32"),
    ("kivi4", 16, 128, 1, "bfloat16"),
    *((name, 64, 64, 2, "bfloat16") for name in ODD_RECIPES),
    *((name, 80, 32, 3, "float32") for name in ODD_RECIPES),
    ("native", 80, 32, 8, "bfloat16"),
    ("native", 64, 64, 1, "float32"),
]


def make_pages(layout: PageLayout, kinds: list[str], seed: int = 0) -> Tensor:
    """[kinds, layers, 2, kv_heads, P, D], each page of one kind, in the model's dtype."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    dtype = getattr(torch, layout.dtype)
    pages = torch.zeros(len(kinds), *layout.slot_shape, dtype=dtype)
    for page, kind in zip(pages, kinds, strict=True):
        for side in (0, 1):
            page[:, side] = KINDS[kind](random, tuple(page[:, side].shape)).to(dtype)
    return pages


def sealed(layout: PageLayout, pages: Tensor) -> PoolTensors:
    """Page `i` in slot `i + 1`, sealed into page `i + 1`, all at once."""
    count = len(pages) + 1
    pool = PoolTensors.allocate(layout, num_pages=count, num_slots=count, device=torch.device("cpu"))
    pool.open[1:] = pages
    TorchBackend(pool, rotary(layout.head_dim)).seal(list(range(1, count)), list(range(1, count)))
    return pool


@pytest.mark.parametrize("recipe, head_dim, page_tokens, num_kv_heads, dtype", SHAPES)
def test_records_equal_the_oracles_bit_for_bit(
    recipe: str, head_dim: int, page_tokens: int, num_kv_heads: int, dtype: str
):
    layout = make_layout(
        recipe, num_layers=2, head_dim=head_dim, page_tokens=page_tokens, num_kv_heads=num_kv_heads, dtype=dtype
    )
    pages = make_pages(layout, list(KINDS))
    pool = sealed(layout, pages)
    for kind, page, record in zip(KINDS, pages, pool.sealed[1:].numpy(), strict=True):
        k, v = page.float().transpose(0, 1).numpy()
        norms = None
        if layout.recipe.layers[0].norm_k:
            # the order of the sum is free: the next fp16 number is as good, and codes follow the stored norm
            norms = stored_norms(layout, record)
            exact = np.stack([token_norms(keys) for keys in k])
            places = norms.view(np.int16).astype(int) - exact.view(np.int16)  # positive fp16 counts up as integers
            assert np.abs(places).max() <= 1, kind
        assert_same_record(layout, record, encode_page(layout, k, v, norms))
    assert not pool.sealed[0].any()


@pytest.mark.parametrize("codec, dtype", [(Float8(4, 3), torch.float8_e4m3fn), (Float8(5, 2), torch.float8_e5m2)])
def test_oracles_float8_is_the_format(codec: Float8, dtype: torch.dtype):
    """Values of all codes up to 448, and rounding of numbers around every boundary, in two implementations."""
    values = torch.tensor(float8_values(codec))
    used = (values.abs() <= 448).nonzero().flatten()
    assert torch.equal(used.to(torch.uint8).view(dtype).double(), values[used])
    positive = values[: len(used) // 2]
    middle = (positive[:-1] + positive[1:]) / 2
    points = torch.cat([positive, middle, middle * (1 - 2**-20), middle * (1 + 2**-20)]).float()
    points = torch.cat([points, -points])
    assert torch.equal(torch.from_numpy(nearest_float8(points.numpy(), codec)), points.to(dtype).view(torch.uint8))


FP16 = 2.0**-11  # how much of a number fp16 rounds by; near zero it is 2^-25


def error_bound(x: np.ndarray, store: Store) -> np.ndarray:
    """The largest |x - stored| that the definition allows, from `x` [kv_heads, P, D] alone. The last term is what fp32
    arithmetic adds."""
    heads, tokens, channels = x.shape
    group_tokens, group_channels = (
        math.gcd(store.group_tokens or 0, tokens),
        math.gcd(store.group_channels or 0, channels),
    )
    blocks = x.reshape(heads, tokens // group_tokens, group_tokens, channels // group_channels, group_channels)
    low, high = blocks.min((2, 4), keepdims=True), blocks.max((2, 4), keepdims=True)
    bound = np.broadcast_to(bound_in_block(blocks, low, high, store), blocks.shape)
    return bound.reshape(x.shape) + np.abs(x).max() * 2.0**-21


def bound_in_block(blocks: np.ndarray, low: np.ndarray, high: np.ndarray, store: Store) -> np.ndarray:
    codec, span, largest = store.codec, high - low, np.maximum(np.abs(low), np.abs(high))
    left_out = span * (1 - store.clip) / 2  # on either side
    match codec:
        case Integer():
            scale, far, widest, zero = span * store.clip / codec.max_code, codec.max_code, 0.5, low + left_out
        case Symmetric(8):
            scale, far, widest, zero = largest / 127, 127, 0.5, np.zeros_like(low)
        case Symmetric():  # the end that has no code of its own is a whole step off
            scale, far, widest, zero = largest / codec.centre, codec.centre, 1.0, np.zeros_like(low)
        case Table():
            gaps = max(high - low for low, high in itertools.pairwise(codec.values))
            scale, far, widest, zero = largest, 1.0, gaps / 2, np.zeros_like(low)
        case Float8():
            scale = np.maximum(largest / codec.max_code * (1 + FP16), 2.0**-14)
            bias = 2 ** (codec.exponent_bits - 1) - 1
            half_step = np.abs(blocks) * 2.0 ** -(codec.mantissa_bits + 1)
            return np.maximum(half_step, scale * 2.0 ** (-bias - codec.mantissa_bits)) + np.abs(blocks) * FP16
    if store.parameters is Parameters.HALF:  # ends that the rounded parameters leave out
        step, lost = np.maximum(scale * (1 + FP16), 2.0**-14), np.abs(zero) * FP16 + 2.0**-25 + far * scale * FP16
    else:
        unit = far / 32  # of the zero, in scales
        scale = np.maximum(scale, np.abs(zero) / (120 * unit))
        factor = np.maximum(scale.max((1, 3), keepdims=True) / 1.9375 * (1 + FP16), 2.0**-14)
        rounding = np.maximum(scale * (1 / 32 + FP16), factor * 2.0**-18)  # five bits, and fewer below 2^-14
        step = scale + rounding
        lost = far * rounding + np.any(zero) * unit * (step / 2 + 120 * factor * 2.0**-18)
    return np.maximum(widest * step, lost) + left_out


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("head_dim, num_kv_heads", [(64, 3), (80, 1)])
def test_error_stays_within_half_a_step(recipe: str, head_dim: int, num_kv_heads: int):
    layout = make_layout(recipe, num_layers=1, head_dim=head_dim, num_kv_heads=num_kv_heads)
    layer = layout.recipe.layers[0]
    pages = make_pages(layout, IN_RANGE)
    pool = sealed(layout, pages)
    reader = PageReader(layout, pool.sealed.numpy(), pool.open.double().numpy())
    for index, kind in enumerate(IN_RANGE):
        exact_k, exact_v = pages[index, 0].double().numpy()
        k, v = reader.read(0, PageRef(Pool.SEALED, index + 1))
        norm = np.ones(layout.page_tokens)
        if layer.norm_k:
            norm = stored_norms(layout, pool.sealed[index + 1].numpy())[0].astype(float)
        bound = error_bound(exact_k / norm[:, None], layer.k) * norm[:, None]
        assert (np.abs(k - exact_k) <= bound).all(), kind
        assert (np.abs(v - exact_v) <= error_bound(exact_v, layer.v)).all(), kind


@pytest.mark.parametrize("recipe", [*RECIPE_NAMES, *(name for name in ODD_RECIPES if "rope" not in name)])
def test_backend_reads_what_the_oracle_reads_and_never_nan(recipe: str):
    layout = make_layout(recipe, num_layers=2, num_kv_heads=2, head_dim=80, page_tokens=32)
    pool = sealed(layout, make_pages(layout, list(KINDS)))
    reader = PageReader(layout, pool.sealed.numpy(), pool.open.double().numpy())
    order = [5, 1, 13, 2, 9, 12, 3, 4, 8, 11, 6, 7, 10]
    for layer in (0, 1):
        refs = [PageRef(Pool.SEALED, page) for page in order]
        read = LayerPages(pool, layer).read_refs(PageIndex(refs, torch.device("cpu")), None)
        expected = zip(*(reader.read(layer, PageRef(Pool.SEALED, page)) for page in order), strict=True)
        for actual, tiles in zip(read, expected, strict=True):
            assert torch.isfinite(actual).all()
            wanted = torch.from_numpy(np.stack(tiles, 1))  # [kv_heads, pages, P, D]
            error = (actual.unflatten(1, wanted.shape[1:3]) - wanted).abs()
            # scale · code + zero, then times the norm: each rounds once in fp32, relative to the larger part
            largest = wanted.abs().amax((0, 2, 3), keepdim=True)
            assert (error <= largest * 2**-21).all()


@pytest.mark.parametrize("recipe", [*RECIPE_NAMES, *ODD_RECIPES])
@pytest.mark.parametrize("head_dim, num_kv_heads", [(64, 3), (80, 1), (128, 8)])
def test_bytes_do_not_depend_on_how_many_pages_are_sealed_at_once_or_where_from(
    recipe: str, head_dim: int, num_kv_heads: int
):
    layout = make_layout(recipe, num_layers=2, head_dim=head_dim, num_kv_heads=num_kv_heads, dtype="float32")
    num_pages, size = 5, layout.page_tokens
    pages = make_pages(layout, ["random"] * num_pages, seed=head_dim)
    expected = sealed(layout, pages)

    alone = PoolTensors.allocate(layout, num_pages=num_pages + 1, num_slots=2, device=torch.device("cpu"))
    for index, page in enumerate(pages, start=1):
        alone.open[1] = page
        TorchBackend(alone, rotary(layout.head_dim)).seal([1], [index])
    assert same_bits(alone.sealed, expected.sealed)

    # the same pages as one chunk, its K and V strided views of one fused activation with rows of q before them
    activations = PoolTensors.allocate(layout, num_pages=num_pages + 1, num_slots=1, device=torch.device("cpu"))
    backend = TorchBackend(activations, rotary(layout.head_dim))
    # sinks of the sequence come before the chunk, so that all its pages are sealed
    context = tuple(PageRef(Pool.OPEN, 0) for _ in range(layout.recipe.sink_pages))
    targets = tuple(PageRef(Pool.SEALED, page) for page in range(1, num_pages + 1))
    chunk = PrefillChunk(len(context) * size, num_pages * size, context, targets)
    tables = backend.prepare(AttentionStep((), (chunk,)))
    for layer in (0, 1):
        rows = pages[:, layer].permute(0, 3, 1, 2, 4).flatten(0, 1)  # [tokens, 2, kv_heads, D]
        fused = torch.full((len(rows), 4 * num_kv_heads, head_dim), torch.nan)
        fused[:, 2 * num_kv_heads : 3 * num_kv_heads], fused[:, 3 * num_kv_heads :] = rows[:, 0], rows[:, 1]
        _, k, v = fused.split((2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        assert not k.is_contiguous() and not v.is_contiguous()
        backend.append(layer, k, v, tables)
    assert same_bits(activations.sealed, expected.sealed)
    assert not activations.open.any()


def test_sealing_leaves_the_slots_and_other_pages_alone():
    layout = make_layout("int4", num_layers=2)
    pages = make_pages(layout, ["random"] * 3)
    pool = PoolTensors.allocate(layout, num_pages=5, num_slots=4, device=torch.device("cpu"))
    pool.open[1:] = pages
    pool.sealed.fill_(0xA5)
    TorchBackend(pool, rotary(layout.head_dim)).seal([3, 1], [2, 4])
    assert same_bits(pool.open[1:], pages)
    assert (pool.sealed[[0, 1, 3]] == 0xA5).all()
    assert (pool.sealed[[2, 4]] != 0xA5).any(1).all()
