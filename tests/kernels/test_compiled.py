"""The compiled kernels for each instruction set against the oracle, and what their results must not depend on."""

import ctypes
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.backend import CpuBackend, layer_of
from kernels.cpu.build import paths
from kernels.cpu.tables import SPLIT_PAGES
from kernels.format.codec import Integer, Raw, per_channel, per_token
from kernels.format.layout import PageLayout, Pool
from kernels.format.named import RECIPE_NAMES
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.format.step import AttentionStep
from tests.kernels.builders import ODD_RECIPES, Pools, rotary, same_bits
from tests.kernels.checks import Shape, check_step, compiled
from tests.kernels.compiled import kernel_path
from tests.kernels.steps import StepBuilder

PATHS = list(paths())
UNCOMPILED = ("outliers", "rows", "marked rows", "before rope", "before rope, rotated", "raw before rope")
COMPILED = [name for name in ODD_RECIPES if name not in UNCOMPILED]
# every named recipe at the demo model's shape; all groups of queries; rows that fill no vector, whole ones, many
SHAPES = [
    *(Shape(name, 64, 64, 2, 3, 1, "bfloat16") for name in RECIPE_NAMES),
    *(Shape("int4", 16, 32, 1, group, 1, "float32") for group in (1, 2, 4, 5, 6, 7, 8, 9, 16)),
    *(Shape(name, 24, 32, 2, 2, 1, "float16") for name in ("native", "int8", "int4", "int3", "int2", "fp8_e5m2")),
    *(Shape(name, 128, 128, 1, 4, 1, "bfloat16") for name in ("native", "int4", "k4v2", "int3", "int2")),
    *(Shape(name, 40, 32, 1, 3, 2, "float32") for name in COMPILED),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_rows(shape: Shape, path: str):
    """Own pages that are full or hold one token, one split or two, and what was dropped."""
    kernel_path(path)
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=SPLIT_PAGES + 12, num_slots=20))
    for length in (1, size, 2 * size - 1, (SPLIT_PAGES + 1) * size + 1):
        builder.add_decode(length - 1)
    builder.add_decode(5 * size + 7, is_observed=True, dropped=slice(2, 4))
    check_step(builder, compiled(path), shape.group)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks(shape: Shape, path: str):
    """One token, one page, pages behind sealed ones of the same chunk and of others, sinks, tails; one is observed."""
    kernel_path(path)
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=24, num_slots=20))
    builder.add_decode(size + 2)
    for start, length in ((0, 1), (0, size), (0, 2 * size + size // 2), (3 * size, 5)):
        builder.add_chunk(start, length)
    builder.add_chunk(3 * size, size + 3, dropped=slice(1, 2))
    builder.add_chunk(size, size + 3, num_observed=4)
    check_step(builder, compiled(path), shape.group)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("names", [("before rope", "groups"), ("groups", "rows")], ids=" and ".join)
def test_a_layer_that_is_not_compiled_is_pytorchs(names: tuple[str, str], path: str):
    recipe = Recipe("mixed", tuple(ODD_RECIPES[name] for name in names), 32, 1)
    pools = Pools(PageLayout(recipe, num_kv_heads=2, head_dim=16, dtype="float32"), num_pages=12, num_slots=6)
    backend = CpuBackend(pools.tensors, rotary(16), num_heads=4, path=kernel_path(path))
    assert backend.name == f"cpu ({path}), torch in 1 of 2 layers"
    builder = StepBuilder(pools)
    builder.add_decode(5 * 32 + 3, is_observed=True)
    builder.add_decode(31)
    check_step(builder, compiled(path), 2)


def write_own_pages(builder: StepBuilder) -> None:
    """As `append` does."""
    for decode, row in zip(builder.step.decode, builder.rows, strict=True):
        builder.pools.write(decode.pages[-1], row.own_k, row.own_v)


def outputs(pools: Pools, step: AttentionStep, q: Tensor, path: str) -> Tensor:
    """fp32 [rows, heads, D] of the first layer, as the pools are."""
    backend = CpuBackend(pools.tensors, None, num_heads=q.shape[1], path=kernel_path(path))
    none = q.new_zeros(len(q), pools.layout.num_kv_heads, q.shape[2])
    return backend.attend(0, q, none, none, backend.prepare(step))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("recipe", ["native", "int4", "blocks"])
def test_neither_threads_nor_company_change_a_bit(recipe: str, path: str, threads: None):
    shape = Shape(recipe, 64, 32, 2, 3, 1, "bfloat16")
    builder = StepBuilder(shape.pools(num_pages=80, num_slots=20))
    for position in ((2 * SPLIT_PAGES + 3) * 32 + 5, 3, 9 * 32, 31, SPLIT_PAGES * 32 + 1):
        builder.add_decode(position)
    write_own_pages(builder)
    q = builder.pools.random(len(builder.rows), 6, 64).float()
    whole = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        whole.append(outputs(builder.pools, builder.step, q, path))
    assert torch.isfinite(whole[0]).all()
    assert same_bits(whole[0], whole[1]) and same_bits(whole[0], whole[2])
    for index, row in enumerate(builder.step.decode):
        alone = outputs(builder.pools, AttentionStep((row,), ()), q[index : index + 1], path)
        assert same_bits(alone[0], whole[0][index])


@pytest.mark.parametrize("path", PATHS)
def test_a_query_that_is_not_finite_does_not_look_sound(path: str):
    """The engine refuses logits that are not finite, so attention must not hide them; nor may it spoil other rows."""
    builder = StepBuilder(Shape("int4", 64, 32, 2, 2, 1, "bfloat16").pools(num_pages=20, num_slots=9))
    builder.add_decode(5 * 32)
    builder.add_decode(3 * 32 + 1)
    write_own_pages(builder)
    q = builder.pools.random(2, 4, 64).float()
    sound = outputs(builder.pools, builder.step, q, path)
    for bad in (math.nan, math.inf):
        q[0, 1, 5] = bad
        spoiled = outputs(builder.pools, builder.step, q, path)
        assert not torch.isfinite(spoiled[0, 1]).any()
        assert same_bits(spoiled[1], sound[1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("recipe", [*RECIPE_NAMES, *COMPILED])
@pytest.mark.parametrize("head_dim", [64, 40])
def test_unpacked_pages_are_the_oracles(head_dim: int, recipe: str, path: str):
    """To the roundings of fp32: products with a scale, its factor and a norm, a sum with a zero of four ranges."""
    kernels = kernel_path(path)
    pools = Shape(recipe, head_dim, 32, 2, 1, 0, "bfloat16").pools(num_pages=3, num_slots=1)
    ref = pools.take(Pool.SEALED)
    pools.write(ref, pools.random_keys(32), pools.random_values(32))
    layer = layer_of(pools.tensors, 1, 2)
    assert layer is not None
    scratch = torch.zeros(kernels.scratch_bytes(ctypes.byref(layer)), dtype=torch.uint8)
    for is_key, expected in zip((True, False), pools.reader().read(1, ref), strict=True):
        fields = pools.layout.layers[1].k if is_key else pools.layout.layers[1].v
        as_stored = expected if is_key or isinstance(fields.store.codec, Raw) else expected.swapaxes(1, 2)
        largest = np.abs(expected).max()
        for head in range(2):
            tile = torch.full(as_stored.shape[1:], torch.nan)
            kernels.unpack(ctypes.byref(layer), ref.id, head, is_key, tile.data_ptr(), scratch.data_ptr())
            assert (np.abs(tile.double().numpy() - as_stored[head]) <= 2.0**-21 * largest).all()


@pytest.mark.parametrize("path", PATHS)
def test_powers_of_two(path: str):
    """A polynomial with a relative error of 2e-9, the rounding of its last step, half of the one before, and so on:
    below two roundings of 2^-24 in all. Below -126 it is 2^-126."""
    kernels = kernel_path(path)
    x = np.concatenate([np.linspace(-126, 0, 2_000_001), -np.logspace(-30, 2, 100_000), np.arange(-126, 127)])
    x = x.astype(np.float32)
    y = np.empty_like(x)
    pointers = (array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (x, y))
    kernels.exp2(*pointers, len(x))
    exact = np.exp2(x.astype(np.float64))
    assert np.abs(y / exact - 1).max() <= 2.0**-23
    assert (y[-253:] == exact[-253:]).all()  # whole powers
    odd = np.array([-127, -1e9, -np.inf, np.nan], np.float32)
    y = np.empty_like(odd)
    kernels.exp2(*(array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (odd, y)), 4)
    assert (y[:3] == np.float32(2.0**-126)).all() and np.isnan(y[3])


def test_bits_that_no_kernel_knows_are_pytorchs():
    layer = LayerRecipe(per_channel(Integer(1)), per_token(Integer(4)))
    layout = PageLayout(Recipe("bits", (layer,), 32, 1), num_kv_heads=1, head_dim=16, dtype="float32")
    assert layer_of(Pools(layout, num_pages=2, num_slots=2).tensors, 0, 1) is None
