"""Attention mass: `check_step` compares it with the oracle, and its sum with the number of observed queries."""

import pytest
import torch

from kernels.torch_backend.backend import BLOCK_ELEMENTS
from kernels.torch_backend.tables import CONTEXT_PAGES
from tests.kernels.builders import rotary, same_bits
from tests.kernels.checks import BACKENDS, SHAPES, TORCH, Candidate, Shape, check_step
from tests.kernels.steps import StepBuilder


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixed_step(shape: Shape, candidate: Candidate):
    """Observed decode rows and chunks among others that are not; pages of one row in order, though items are not."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=100, num_slots=40))
    for length, is_observed in (
        (4 * size + 5, False),
        (1, True),
        (5 * size, True),
        (size + 1, False),
        ((2 * CONTEXT_PAGES + 3) * size + 7, True),
        (size, True),
    ):
        builder.add_decode(length - 1, is_observed)
    builder.add_decode(6 * size + 5, is_observed=True, dropped=slice(3, 5))
    for start, length, num_observed in (
        (0, 1, 1),
        (0, size, 3),
        (2 * size, 5, 0),
        (size, 2 * size + 3, 9),  # over a page's end
        ((CONTEXT_PAGES + 3) * size, size + 1, 2),
        (0, 3 * size, 1),
    ):
        builder.add_chunk(start, length, num_observed)
    builder.add_chunk(7 * size, size + size // 2, num_observed=7, dropped=slice(3, 6))
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
@pytest.mark.parametrize(
    "decode, chunks",
    [
        ([0], []),
        ([31, 5], []),
        ([], [(0, 128, 128)]),  # every query
        ([], [(64, 100, 64), (0, 31, 31)]),
    ],
    ids=["first token", "own pages only", "one chunk", "chunks only"],
)
def test_steps_of_one_kind(shape: Shape, candidate: Candidate, decode: list[int], chunks: list[tuple[int, int, int]]):
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=20))
    for position in decode:
        builder.add_decode(position, is_observed=True)
    for start, length, num_observed in chunks:
        builder.add_chunk(start, length, num_observed)
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]], ids=str)
def test_logits_far_apart(shape: Shape, candidate: Candidate):
    """Nearly all of a head's weight lies in one page, whichever it is."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=20))
    builder.add_decode(20 * size + 3, is_observed=True)
    builder.add_chunk(10 * size, 2 * size + 1, num_observed=5)
    check_step(builder, candidate, shape.group, query_scale=128.0)


@pytest.mark.parametrize("recipe", ["native", "int4"])
def test_decode_over_more_pages_than_fit_one_block(recipe: str):
    shape = Shape(recipe, 128, 64, 8, 1, 1, "bfloat16")
    builder = StepBuilder(shape.pools(num_pages=40, num_slots=8))
    block_pages = BLOCK_ELEMENTS // (shape.num_kv_heads * shape.page_tokens * shape.head_dim)
    builder.add_decode(4 * 64)
    builder.add_decode((block_pages + 5) * 64 + 9, is_observed=True)
    check_step(builder, TORCH, shape.group)


@pytest.mark.parametrize("candidate", BACKENDS, ids=str)
@pytest.mark.parametrize("recipe", ["native", "int4"])
def test_being_observed_changes_no_output(recipe: str, candidate: Candidate):
    shape = Shape(recipe, 64, 32, 2, 3, 1, "bfloat16")
    outputs = []
    for is_observed in (False, True):
        builder = StepBuilder(shape.pools(num_pages=40, num_slots=20))
        for position in (100, 3):
            builder.add_decode(position, is_observed)
        builder.add_chunk(64, 70, num_observed=40 * is_observed)
        k, v = builder.activations(0)
        q = builder.pools.random(len(k), 6, 64).float()
        backend = candidate.make(builder.pools.tensors, rotary(64), 6)
        tables = backend.prepare(builder.step)
        backend.append(0, k[:, 0], v[:, 0], tables)
        outputs.append(backend.attend(0, q, k[:, 0], v[:, 0], tables))
        assert [bool(pages) for pages in backend.mass(tables)] == 3 * [is_observed]
    assert torch.isfinite(outputs[0]).all()
    assert same_bits(*outputs)
