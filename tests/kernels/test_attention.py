"""Both torch backends against the oracle, over pools that hold NaN wherever a row has no business."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kernels.backend import PoolTensors
from kernels.format.layout import PageLayout
from kernels.torch_backend.backend import BLOCK_ELEMENTS, TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend
from kernels.torch_backend.tables import CONTEXT_PAGES
from tests.kernels.builders import Pools, make_layout, same_bits
from tests.kernels.steps import StepBuilder

BACKENDS = [TorchBackend, InvariantTorchBackend]
LAYER = 1  # the last of two, so that a wrong layer's bytes are noticed
PADDING = 3


def tolerance(expected: np.ndarray, logit: float, value: float, num_keys: int, layout: PageLayout) -> np.ndarray:
    """|error| of fp32 attention.

    A logit sums D products of size up to `logit`, and exp turns its error into a relative one of a weight; the sums
    over keys add theirs. Roundings of 2^-24 add up like a random walk; twice that is allowed.
    """
    roundings = math.sqrt(layout.head_dim) * logit + math.sqrt(num_keys)
    return np.abs(expected) * 2.0**-24 + 2 * 2.0**-24 * roundings * value


HALF_ULP = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-12}


def sixteen_bit_tolerance(expected: np.ndarray, logit: float, value: float, layout: PageLayout) -> np.ndarray:
    """What rounding adds where pages of 16-bit values are attended to in 16 bit, as decode does on a CPU.

    The query's rounding moves a logit by a share of `logit`, so weights by twice that (their sum moves too); weights
    are rounded for the product with V, and so is its result.
    """
    rounding = HALF_ULP[layout.dtype]
    return rounding * ((2 * logit + 1) * value + np.abs(expected))


@dataclass(frozen=True)
class Shape:
    recipe: str
    head_dim: int
    page_tokens: int
    num_kv_heads: int
    group: int
    sink_pages: int
    dtype: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.recipe, *list(self.__dict__.values())[1:]))

    def pools(self, num_pages: int, num_slots: int) -> Pools:
        layout = make_layout(
            self.recipe,
            num_layers=2,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            sink_pages=self.sink_pages,
            dtype=self.dtype,
        )
        return Pools(layout, num_pages=num_pages, num_slots=num_slots)


# every recipe, head size, page size, group and number of sinks with each dtype; native has no sinks
SHAPES = [
    Shape("native", 64, 64, 3, 3, 0, "bfloat16"),
    Shape("native", 16, 32, 2, 1, 0, "float32"),
    Shape("int8", 64, 64, 2, 3, 1, "bfloat16"),
    Shape("int8", 80, 32, 1, 16, 2, "float32"),
    Shape("int4", 64, 64, 3, 3, 1, "bfloat16"),
    Shape("int4", 80, 32, 2, 4, 2, "float16"),
    Shape("int4", 16, 32, 2, 8, 0, "float32"),
    Shape("fp8_e5m2", 80, 64, 1, 4, 2, "bfloat16"),
    Shape("fp8_e5m2", 64, 32, 1, 8, 0, "float16"),
    Shape("fp8_e4m3", 128, 32, 2, 1, 1, "bfloat16"),
    Shape("kivi4", 64, 32, 2, 3, 1, "float32"),
    Shape("kivi4", 16, 64, 1, 16, 0, "bfloat16"),
]


def check_step(builder: StepBuilder, backend_type: type[TorchBackend], group: int, query_scale: float = 1.0) -> None:
    """Runs the step and compares rows of `LAYER` with the oracle, and every byte of both pools with what they held
    before or were to be given."""
    pools = builder.pools
    layout = pools.layout
    k, v = builder.activations(PADDING)
    q = pools.random(len(k), layout.num_kv_heads * group, layout.head_dim).float() * query_scale
    q[-PADDING:] = torch.nan
    expected_sealed, expected_open = builder.expected_pools()
    tensors = PoolTensors(layout, pools.tensors.sealed.clone(), pools.tensors.open.clone())
    inputs = [x.clone() for x in (q, k, v)]

    backend = backend_type(tensors)
    tables = backend.prepare(builder.step)
    for layer in range(len(layout.layers)):
        backend.append(layer, k[:, layer], v[:, layer], tables)
        actual = backend.attend(layer, q, k[:, layer], v[:, layer], tables)

    assert same_bits(tensors.sealed, expected_sealed)
    assert same_bits(tensors.open, expected_open)
    assert all(same_bits(x, before) for x, before in zip((q, k, v), inputs, strict=True))
    assert actual.dtype == q.dtype and actual.shape == q.shape
    assert torch.isfinite(actual).all()
    assert not actual[-PADDING:].any()

    pools.tensors.sealed.copy_(expected_sealed)
    pools.tensors.open.copy_(expected_open)
    reader = pools.reader()
    edges = (1, layout.page_tokens - 1, layout.page_tokens)
    for index, row in enumerate(builder.rows):
        if len(row.own_k) not in edges and index >= len(builder.step.decode) and index % 5:
            continue  # the oracle is slow: of a chunk's rows, those at page edges and every 5th
        own_k, own_v = (x[:, LAYER].double().numpy() for x in (row.own_k, row.own_v))
        query = q[index].double().numpy()
        expected = reader.attend(LAYER, query, row.before, own_k, own_v)
        num_keys = len(row.before) * layout.page_tokens + len(own_k)
        # keys are at most 4 (5 as stored) in each channel, values at most 6
        logit = 5 * np.abs(query).max() / math.sqrt(layout.head_dim)
        bound = tolerance(expected, logit, 6.0, num_keys, layout)
        is_decode = index < len(builder.step.decode)
        if is_decode and backend_type is TorchBackend and layout.recipe.layers[LAYER].is_raw:
            bound += sixteen_bit_tolerance(expected, logit, 6.0, layout)
        error = np.abs(actual[index].double().numpy() - expected)
        assert (error <= bound).all(), f"row {index}: {error.max()} over {bound.min()}"


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_step(shape: Shape, backend_type: type[TorchBackend]):
    """Decode rows of lengths 1, P - 1, P, P + 1 and of more than two splits, with chunks that have context and tails,
    or neither."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=90, num_slots=40))
    long = 2 * CONTEXT_PAGES + 3  # pages, more than two splits beside the sinks
    for length in (1, size - 1, size, size + 1, 3 * size, 4 * size + 5, long * size + 7):
        builder.add_decode(length - 1)
    for start, length in (
        (0, 1),
        (0, size - 1),
        (0, size),
        (0, 3 * size + size // 2),
        (size, 2 * size),
        (2 * size, 5),
        ((CONTEXT_PAGES + 3) * size, size + 1),
    ):
        builder.add_chunk(start, length)
    check_step(builder, backend_type, shape.group)


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4]], ids=str)
@pytest.mark.parametrize(
    "decode, chunks",
    [
        ([0], []),  # one row, no sealed page
        ([31, 5, 0], []),  # no row has a sealed page
        ([200], []),
        ([100, 300, 4, 130], []),
        ([], [(0, 128)]),
        ([], [(128, 64), (0, 31), (64, 192)]),
    ],
    ids=["first token", "own pages only", "one row", "decode only", "one chunk", "chunks only"],
)
def test_steps_of_one_kind(
    shape: Shape, backend_type: type[TorchBackend], decode: list[int], chunks: list[tuple[int, int]]
):
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=20))
    for position in decode:
        builder.add_decode(position)
    for start, length in chunks:
        builder.add_chunk(start, length)
    check_step(builder, backend_type, shape.group)


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_logits_far_apart(shape: Shape, backend_type: type[TorchBackend]):
    """The largest logit may be in any page, hundreds above all others: every partial sum is shifted by it."""
    builder = StepBuilder(shape.pools(num_pages=90, num_slots=20))
    for position in (20 * shape.page_tokens + 3, 5, 9 * shape.page_tokens):
        builder.add_decode(position)
    builder.add_chunk(10 * shape.page_tokens, 3 * shape.page_tokens)
    check_step(builder, backend_type, shape.group, query_scale=128.0)


@pytest.mark.parametrize("recipe", ["native", "int4"])
def test_decode_over_more_pages_than_fit_one_block(recipe: str):
    """Pages are unpacked a few at a time; a row's may lie in two blocks."""
    shape = Shape(recipe, 128, 64, 8, 1, 1, "bfloat16")
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=8))
    block_pages = BLOCK_ELEMENTS // (shape.num_kv_heads * shape.page_tokens * shape.head_dim)
    for pages in (CONTEXT_PAGES + 2, 3 * CONTEXT_PAGES + 3, 1):
        builder.add_decode(pages * 64 + 9)
    assert CONTEXT_PAGES + 2 < block_pages < 3 * CONTEXT_PAGES + 3
    check_step(builder, TorchBackend, shape.group)


def test_tolerance_tells_a_lost_token_from_rounding():
    """The bound used above is far below the change that one wrong key makes, for every dtype's fp32 part."""
    shape = SHAPES[3]
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=8))
    builder.add_decode(19 * shape.page_tokens + 7)
    (row,) = builder.rows
    layout, reader = builder.pools.layout, builder.pools.reader()
    query = builder.pools.random(shape.group, shape.head_dim).double().numpy()
    own_k, own_v = (x[:, LAYER].double().numpy() for x in (row.own_k, row.own_v))
    full = reader.attend(LAYER, query, row.before, own_k, own_v)
    short = reader.attend(LAYER, query, row.before, own_k[1:], own_v[1:])
    bound = tolerance(full, 5 * np.abs(query).max() / math.sqrt(shape.head_dim), 6.0, 20 * 32, layout)
    assert np.abs(full - short).max() > 20 * bound.max()
