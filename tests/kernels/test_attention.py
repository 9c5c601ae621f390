"""Both torch backends against the oracle, over pools that hold NaN wherever a row has no business."""

import math

import numpy as np
import pytest

from kernels.torch_backend.backend import BLOCK_ELEMENTS
from kernels.torch_backend.tables import CONTEXT_PAGES
from tests.kernels.checks import BACKENDS, LAYER, SHAPES, TORCH, Candidate, Shape, check_step, tolerance
from tests.kernels.steps import StepBuilder


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_step(shape: Shape, candidate: Candidate):
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
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
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
def test_steps_of_one_kind(shape: Shape, candidate: Candidate, decode: list[int], chunks: list[tuple[int, int]]):
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=20))
    for position in decode:
        builder.add_decode(position)
    for start, length in chunks:
        builder.add_chunk(start, length)
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_logits_far_apart(shape: Shape, candidate: Candidate):
    """The largest logit may be in any page, hundreds above all others: every partial sum is shifted by it."""
    builder = StepBuilder(shape.pools(num_pages=90, num_slots=20))
    for position in (20 * shape.page_tokens + 3, 5, 9 * shape.page_tokens):
        builder.add_decode(position)
    builder.add_chunk(10 * shape.page_tokens, 3 * shape.page_tokens)
    check_step(builder, candidate, shape.group, query_scale=128.0)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES[:3], *SHAPES[4:7]], ids=str)
def test_dropped_pages(shape: Shape, candidate: Candidate):
    """What was dropped leaves a gap in the middle of a sequence; positions in a page are as before."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=100, num_slots=30))
    long = 2 * CONTEXT_PAGES + 3
    builder.add_decode(6 * size + 5, dropped=slice(2, 4))
    builder.add_decode(5 * size, dropped=slice(2, 5))  # only sink pages and the own one are left
    builder.add_decode(long * size - 1, dropped=slice(3, -4))
    builder.add_chunk(5 * size, 2 * size + 3, dropped=slice(2, 4))
    builder.add_chunk(long * size, 7, dropped=slice(2, CONTEXT_PAGES))
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES[:3], *SHAPES[4:7]], ids=str)
@pytest.mark.parametrize("num_before", [0, 4])
def test_chunks_of_one_sequence_in_one_step(num_before: int, shape: Shape, candidate: Candidate):
    """Each page is a chunk that reads two sink pages and the two pages before it: mostly targets of the same step."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=30))
    builder.add_decode(2 * size + 1)
    builder.add_chunk(size, size + 1)
    start, length = num_before * size, 9 * size + size // 2
    k, v = builder.pools.random_keys(length), builder.pools.random_values(length)
    pages = builder.pools.place(k[:start], v[:start])
    for begin in range(start, length, size):
        context = pages if len(pages) < 5 else pages[:2] + pages[-2:]
        end = min(begin + size, length)
        targets = builder.continue_chunk(context, begin, k[:end], v[:end], num_observed=min(5, end - begin))
        pages += targets[len(context) :]
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("recipe", ["native", "int4"])
def test_decode_over_more_pages_than_fit_one_block(recipe: str):
    """Pages are unpacked a few at a time; a row's may lie in two blocks."""
    shape = Shape(recipe, 128, 64, 8, 1, 1, "bfloat16")
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=8))
    block_pages = BLOCK_ELEMENTS // (shape.num_kv_heads * shape.page_tokens * shape.head_dim)
    for pages in (CONTEXT_PAGES + 2, 3 * CONTEXT_PAGES + 3, 1):
        builder.add_decode(pages * 64 + 9)
    assert CONTEXT_PAGES + 2 < block_pages < 3 * CONTEXT_PAGES + 3
    check_step(builder, TORCH, shape.group)


def test_tolerance_tells_a_lost_token_from_rounding():
    """The bound used above is far below the change that one wrong key makes, for every dtype's fp32 part."""
    shape = SHAPES[3]
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=8))
    builder.add_decode(19 * shape.page_tokens + 7)
    (row,) = builder.rows
    layout, reader = builder.pools.layout, builder.pools.reader()
    query = builder.pools.random(shape.group, shape.head_dim).double().numpy()
    own_k, own_v = (x[:, LAYER].double().numpy() for x in (row.own_k, row.own_v))
    full, _ = reader.attend(LAYER, query, row.before, own_k, own_v)
    short, _ = reader.attend(LAYER, query, row.before, own_k[1:], own_v[1:])
    bound = tolerance(full, 5 * np.abs(query).max() / math.sqrt(shape.head_dim), 6.0, 20 * 32, layout)
    assert np.abs(full - short).max() > 20 * bound.max()
