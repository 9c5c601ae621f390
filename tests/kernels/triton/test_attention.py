"""The Triton backend in the interpreter against the oracle, over pools that hold NaN wherever a row has no business.

In fp32 the tolerance is that of fp32 attention, so that every step of a recipe is seen; 16 bit adds what tiles round.
"""

import pytest
import torch

from kernels.backend import PoolTensors
from kernels.format.codec import Integer, per_channel, per_token
from kernels.format.layout import PageLayout
from kernels.format.recipe import LayerRecipe, MarkedTokens, Recipe
from kernels.triton.tables import SPLIT_PAGES
from tests.kernels.builders import Pools, rotary, same_bits
from tests.kernels.checks import TORCH, Candidate, Shape, check_step
from tests.kernels.steps import StepBuilder
from tests.kernels.triton.candidates import DEVICE, INVARIANT_TRITON, SERVED, TRITON

# every group from 1 to 16 that is odd in some way, head size, page size, number of sinks, dtype
SHAPES = [
    Shape("int4", 128, 64, 1, 4, 1, "bfloat16"),
    Shape("int8", 64, 128, 1, 7, 2, "float16"),
    Shape("native", 64, 64, 2, 3, 0, "bfloat16"),
    Shape("fp8_e4m3", 64, 64, 1, 16, 0, "bfloat16"),
    Shape("int2", 256, 64, 1, 1, 1, "bfloat16"),
    Shape("int3", 64, 128, 1, 8, 1, "float32"),
    Shape("tables", 128, 64, 1, 2, 1, "float16"),
    Shape("before rope, rotated", 128, 64, 1, 2, 1, "bfloat16"),
    Shape("raw before rope", 64, 64, 1, 5, 1, "bfloat16"),
    Shape("rows", 64, 64, 2, 1, 1, "float16"),
]
CANDIDATES = [TRITON, INVARIANT_TRITON]


@pytest.mark.parametrize("recipe", SERVED)
def test_every_recipe_in_fp32(recipe: str):
    """A row at a page's first token behind a sealed page, a chunk whose tail is behind one that it seals."""
    shape = Shape(recipe, 64, 64, 1, 2, 1, "float32")
    builder = StepBuilder(shape.pools(num_pages=30, num_slots=20))
    builder.add_decode(2 * 64, is_observed=True)
    builder.add_chunk(64, 64 + 9, num_observed=12)
    check_step(builder, TRITON, shape.group)


@pytest.mark.parametrize(
    "candidate, shape",
    [*((TRITON, shape) for shape in SHAPES), *((INVARIANT_TRITON, SHAPES[place]) for place in (2, 8))],
    ids=str,
)
def test_mixed_step(shape: Shape, candidate: Candidate):
    """Rows of lengths 1, P - 1, P, P + 1 and of several pages, in two shapes of more than one split, with chunks that
    have context and tails, or neither; some observed."""
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=30))
    for length, is_observed in ((1, True), (size - 1, False), (size, True), (size + 1, False)):
        builder.add_decode(length - 1, is_observed)
    builder.add_decode(((SPLIT_PAGES + 3) if shape in SHAPES[:2] else 3) * size + 6, is_observed=True)
    builder.add_chunk(0, 1)
    builder.add_chunk(0, size)
    builder.add_chunk(0, size + size // 2, num_observed=size)
    builder.add_chunk(3 * size, 5, num_observed=5)
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
@pytest.mark.parametrize(
    "decode, chunks",
    [([0], []), ([31, 5, 0], []), ([200], []), ([], [(0, 128)]), ([], [(128, 64), (0, 31)])],
    ids=["first token", "own pages only", "one row", "one chunk", "chunks only"],
)
def test_steps_of_one_kind(decode: list[int], chunks: list[tuple[int, int]], candidate: Candidate):
    shape = Shape("int8", 64, 64, 1, 3, 1, "float32")
    builder = StepBuilder(shape.pools(num_pages=20, num_slots=10))
    for position in decode:
        builder.add_decode(position)
    for start, length in chunks:
        builder.add_chunk(start, length)
    check_step(builder, candidate, shape.group)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_logits_far_apart(candidate: Candidate):
    """The largest logit may be in any page, hundreds above all others: every partial sum is shifted by it."""
    shape = Shape("kivi4", 64, 64, 2, 3, 1, "float32")
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=20))
    for position in (11 * 64 + 3, 5, 9 * 64):
        builder.add_decode(position, is_observed=True)
    builder.add_chunk(4 * 64, 2 * 64, num_observed=9)
    check_step(builder, candidate, shape.group, query_scale=128.0)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
@pytest.mark.parametrize("recipe", ["int8", "before rope"])
def test_dropped_pages_and_a_window(recipe: str, candidate: Candidate):
    """What was dropped leaves a gap; each page of a sequence as a chunk of its own, reading two sinks and the two pages
    before it, which the same step writes."""
    shape = Shape(recipe, 64, 64, 2, 1, 2, "float32")
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=30))
    builder.add_decode(6 * 64 + 5, is_observed=True, dropped=slice(2, 4))
    builder.add_decode(5 * 64, dropped=slice(2, 5))  # only sink pages and the own one are left
    builder.add_chunk(5 * 64, 64 + 3, num_observed=3, dropped=slice(2, 4))
    length = 4 * 64 + 20
    k, v = builder.pools.random_keys(length), builder.pools.random_values(length)
    pages = builder.pools.place(k[:64], v[:64])
    for begin in range(64, length, 64):
        context = pages if len(pages) < 5 else pages[:2] + pages[-2:]
        end = min(begin + 64, length)
        targets = builder.continue_chunk(context, begin, k[:end], v[:end], num_observed=min(5, end - begin))
        pages += targets[len(context) :]
    check_step(builder, candidate, shape.group)


def test_marked_tokens_are_kept_as_the_torch_backend_keeps_them():
    """Marks come with a step, before its pages are sealed."""
    layer = LayerRecipe(per_channel(Integer(2)), per_token(Integer(2)), outliers=MarkedTokens(3))
    layout = PageLayout(Recipe("marked", (layer,) * 2, 64, 1), num_kv_heads=2, head_dim=64, dtype="float32")
    builder = StepBuilder(Pools(layout, num_pages=20, num_slots=10))
    builder.add_decode(70)
    builder.add_chunk(64, 140)
    builder.add_chunk(0, 200)
    k, v = (x.to(DEVICE) for x in builder.activations(3))
    marks = torch.arange(len(k), device=DEVICE) % 17 == 0
    sealed = []
    for candidate in (TORCH, TRITON):
        memory = builder.pools.tensors
        tensors = PoolTensors(layout, memory.sealed.to(DEVICE, copy=True), memory.open.to(DEVICE, copy=True))
        backend = candidate.make(tensors, rotary(64, DEVICE), 4)
        tables = backend.prepare(builder.step)
        backend.mark(tables, marks)
        for index in (0, 1):
            backend.append(index, k[:, index], v[:, index], tables)
        sealed.append(tensors.sealed)
    assert same_bits(*sealed)
    assert not same_bits(sealed[0], builder.pools.tensors.sealed.to(DEVICE))
