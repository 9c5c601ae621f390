"""Row operations that are compiled for CPUs, for each instruction set, against float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.build import paths
from kernels.cpu.row_ops import CompiledRowOps
from kernels.row_ops import MakeRowOps, RowOps
from tests.kernels.builders import same_bits
from tests.kernels.compiled import kernel_path
from tests.kernels.triton.row_checks import (
    CASES,
    DEVICE,
    EPS,
    HALF_ULP,
    SHAPES,
    Case,
    angles,
    check,
    check_gate,
    check_norm,
    check_turned,
    draw,
    draw_whole,
    exact,
    run_turn,
)

DTYPES = tuple(HALF_ULP)
FP32 = torch.float32
ODD = [Case(3, 1, size, True, False, True, True) for size in (6, 24, 40, 80)]
in_every_path = pytest.mark.parametrize("path", list(paths()))
pytestmark = [
    pytest.mark.usefixtures("guard"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="inputs lie on the GPU"),
]


def maker(path: str) -> MakeRowOps:
    compiled = kernel_path(path)
    return lambda dtype, eps, rotation: CompiledRowOps(compiled, dtype, eps)


def ops_of(path: str, dtype: torch.dtype = torch.bfloat16) -> RowOps:
    return CompiledRowOps(kernel_path(path), dtype, EPS)


@in_every_path
@pytest.mark.parametrize("width", [7, 16, 96, 576, 1100])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_normalise(rows: int, width: int, path: str) -> None:
    hidden, weight = draw(1, rows, width, scale=3.0), draw_whole(2, width)
    check_norm(maker(path), ops_of(path).normalise(hidden, weight), hidden, weight, FP32)


@in_every_path
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_normalise_far_from_one(scale: float, path: str) -> None:
    hidden, weight = draw(1, 3, 96, scale=scale), draw_whole(2, 96)
    check_norm(maker(path), ops_of(path).normalise(hidden, weight), hidden, weight, FP32)


@in_every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_normalise(dtype: torch.dtype, path: str) -> None:
    hidden, delta, weight = draw(1, 3, 570), draw(2, 3, 570, dtype=dtype), draw_whole(3, 570)
    before = exact(hidden)
    total, result = ops_of(path).add_normalise(hidden, delta, weight)
    assert (exact(hidden) == before).all()
    check(maker(path), total, before + exact(delta), np.zeros(before.shape), FP32)
    check_norm(maker(path), result, total, weight, FP32)


@in_every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 48, 1536])
def test_gate(width: int, dtype: torch.dtype, path: str) -> None:
    both = draw(1, 12, 2 * width, dtype=dtype, scale=10.0)
    check_gate(maker(path), ops_of(path).gate(both), both, FP32)


@in_every_path
def test_gates_far_from_zero_are_shut_or_open(path: str) -> None:
    gate = torch.tensor([-10000.0, -200.0, 0.0, 200.0, 10000.0])
    found = ops_of(path).gate(torch.cat([gate, torch.full_like(gate, 2.0)]).repeat(3, 1))
    assert (found == gate.clamp(min=0) * 2).all()


@in_every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *SHAPES, *ODD], ids=str)
def test_turn(case: Case, dtype: torch.dtype, path: str) -> None:
    # so small that a norm's eps shows
    qkv, (cos, sin) = draw(1, 3, case.width, dtype=dtype, scale=0.01), angles(2, case.head_dim)
    before = qkv.clone()
    result = run_turn(ops_of(path, dtype), case, qkv, cos, sin)
    assert torch.equal(qkv, before)
    check_turned(maker(path), case, qkv, cos, sin, result, dtype)


RowFunction = Callable[[RowOps, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
COMPANY = Case(9, 3, 64, True, False, True, True)


def _norm(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return ops.add_normalise(x, x.bfloat16(), draw_whole(3, x.shape[1]))


def _gate(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (ops.gate(x),)


def _turn(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return run_turn(ops, COMPANY, x, cos, sin)


@in_every_path
@pytest.mark.parametrize("function", [_norm, _gate, _turn])
def test_rows_are_treated_alone(function: RowFunction, path: str) -> None:
    """No NaN and no bit of a row goes to another, and there may be none at all."""
    ops = ops_of(path)
    x, (cos, sin) = draw(1, 3, COMPANY.width), angles(2, 64)
    x[1] = torch.nan
    together = function(ops, x, cos, sin)
    for part in together:
        assert part[[0, 2]].isfinite().all() and part[1].isnan().all()
    for row in (0, 2):
        alone = function(ops, *(part[row : row + 1] for part in (x, cos, sin)))
        assert all(same_bits(one, all[row : row + 1]) for one, all in zip(alone, together, strict=True))
    assert all(len(part) == 0 for part in function(ops, *(part[:0] for part in (x, cos, sin))))
