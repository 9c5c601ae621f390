"""A covering set of checks on the device for a machine without pytest, where the test modules cannot be imported.

The interpreter multiplies bf16 wrongly (tests/kernels/triton/conftest.py), so that raw bf16 pages pass on a GPU only.
"""

from collections.abc import Callable, Iterator

import torch

from kernels.format.hadamard import hadamard
from kernels.triton.elementwise import TritonRowOps
from kernels.triton.tables import SPLIT_PAGES
from tests.kernels.checks import Candidate, Shape, check_step
from tests.kernels.steps import StepBuilder
from tests.kernels.triton.candidates import DEVICE, INVARIANT_TRITON, SERVED, TRITON
from tests.kernels.triton.row_checks import EPS, Case, check_turned, draw

Check = Callable[[], None]
MIXED = (
    Shape("int4", 128, 64, 1, 4, 1, "bfloat16"),
    Shape("int8", 64, 128, 1, 7, 2, "float16"),
    Shape("native", 64, 64, 2, 3, 0, "bfloat16"),
    Shape("fp8_e4m3", 64, 64, 1, 16, 0, "bfloat16"),
    Shape("int2", 256, 64, 1, 1, 1, "bfloat16"),
)
TURNS = (Case(9, 3, 64, True, False, True, True), Case(8, 2, 128, True, True, False, False))


def cases() -> Iterator[tuple[str, Check]]:
    """Names and checks, which raise AssertionError. They write, seal and attend, in every recipe."""
    for recipe in SERVED:
        yield f"every recipe in fp32: {recipe}", lambda recipe=recipe: _one(recipe)
    for shape in MIXED:
        for candidate in (TRITON, INVARIANT_TRITON):
            yield f"mixed step: {shape}, {candidate}", lambda shape=shape, candidate=candidate: _mixed(shape, candidate)
    for case in TURNS:
        for dtype in (torch.float32, torch.bfloat16):
            yield f"turn: {case}, {dtype}", lambda case=case, dtype=dtype: _turn(case, dtype)
    for recipe in ("native", "int4"):
        yield f"engine: {recipe}", lambda recipe=recipe: _engine(recipe)


def _one(recipe: str) -> None:
    shape = Shape(recipe, 64, 64, 1, 2, 1, "float32")
    builder = StepBuilder(shape.pools(num_pages=30, num_slots=20))
    builder.add_decode(3 * 64, is_observed=True)
    builder.add_chunk(2 * 64, 64 + 9, num_observed=12)
    check_step(builder, TRITON, shape.group)


def _mixed(shape: Shape, candidate: Candidate) -> None:
    size = shape.page_tokens
    builder = StepBuilder(shape.pools(num_pages=60, num_slots=30))
    for length in (1, size, size + 1, (SPLIT_PAGES + 3) * size + 7):
        builder.add_decode(length - 1, is_observed=length > size)
    builder.add_chunk(0, size + size // 2, num_observed=size)
    builder.add_chunk(3 * size, 5)
    check_step(builder, candidate, shape.group)


def _turn(case: Case, dtype: torch.dtype) -> None:
    qkv = draw(1, 3, case.width, dtype=dtype)
    angles = draw(2, 3, 1, case.head_dim // 2, scale=5.0)
    ops = TritonRowOps(dtype, EPS, torch.tensor(hadamard(case.head_dim), device=DEVICE))
    result = ops.turn(case.turn, qkv, angles.cos(), angles.sin(), *case.weights())
    check_turned(TritonRowOps, case, qkv, angles.cos(), angles.sin(), result, dtype)


def _engine(recipe: str) -> None:
    """Tokens in fp32: the torch backend's, and with graphs where there are any."""
    from dataclasses import replace

    from tests.helpers import TINY, greedy, random_prompt, run, tiny_core

    model = replace(TINY, head_dim=64, num_heads=4, num_kv_heads=2)
    prompt = random_prompt(5, 2 * 64 + 9)
    found = []
    for kernels in ("torch", "triton"):
        core = tiny_core(model, page_tokens=64, kv_format=recipe, kernels=kernels, device=DEVICE.type, kv_memory=2**26)
        requests = [greedy("long", prompt, 60), greedy("short", prompt[:7], 5)]
        found.append([recorder.token_ids for recorder in run(core, requests)])
    assert found[0] == found[1], f"{found[1]} are not {found[0]}"
