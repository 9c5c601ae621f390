"""Row operations, in PyTorch and in Triton, against float64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.format.hadamard import hadamard
from kernels.row_ops import MakeRowOps, RowOps
from kernels.torch_backend.row_ops import TorchRowOps
from kernels.triton.elementwise import TritonRowOps
from tests.kernels.triton.row_checks import (
    CASES,
    DEVICE,
    EPS,
    HALF_ULP,
    ROWS,
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
in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both = pytest.mark.parametrize("make", [TorchRowOps, TritonRowOps])
pytestmark = pytest.mark.usefixtures("guard")


def make_ops(make: MakeRowOps, dtype: torch.dtype, head_dim: int = 64) -> RowOps:
    return make(dtype, EPS, torch.tensor(hadamard(head_dim), device=DEVICE))


@both
@in_every_dtype
@pytest.mark.parametrize("width", [16, 96, 576, 1024, 1536])
def test_normalise(make: MakeRowOps, dtype: torch.dtype, width: int) -> None:
    hidden, weight = draw(1, ROWS, width, scale=3.0), draw_whole(2, width)
    check_norm(make, make_ops(make, dtype).normalise(hidden, weight), hidden, weight, dtype)


@both
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_normalise_far_from_one(make: MakeRowOps, scale: float) -> None:
    hidden, weight = draw(1, ROWS, 96, scale=scale), draw_whole(2, 96)
    check_norm(make, make_ops(make, torch.float32).normalise(hidden, weight), hidden, weight, torch.float32)


@both
@in_every_dtype
@pytest.mark.parametrize("delta_dtype", DTYPES, ids=str)
def test_add_normalise(make: MakeRowOps, dtype: torch.dtype, delta_dtype: torch.dtype) -> None:
    """A product gives the model's dtype or fp32, whatever the dtype of the model."""
    hidden, delta, weight = draw(1, ROWS, 576), draw(2, ROWS, 576, dtype=delta_dtype), draw_whole(3, 576)
    before = exact(hidden)
    total, result = make_ops(make, dtype).add_normalise(hidden, delta, weight)
    assert (exact(hidden) == before).all()
    check(make, total, before + exact(delta), np.zeros(before.shape), torch.float32)
    check_norm(make, result, total, weight, dtype)


@both
@in_every_dtype
@pytest.mark.parametrize("width", [48, 1536])
def test_gate(make: MakeRowOps, dtype: torch.dtype, width: int) -> None:
    both = draw(1, ROWS, 2 * width, dtype=dtype, scale=10.0)
    check_gate(make, make_ops(make, dtype).gate(both), both, dtype)


@both
@in_every_dtype
@pytest.mark.filterwarnings("ignore:overflow")  # of exp, in the interpreter
def test_gates_far_from_zero_are_shut_or_open(make: MakeRowOps, dtype: torch.dtype) -> None:
    gate = torch.tensor([-10000.0, -200.0, 0.0, 200.0, 10000.0], device=DEVICE)
    both = torch.cat([gate, torch.full_like(gate, 2.0)]).repeat(ROWS, 1).to(dtype)
    opened = exact(both)[:, :5].clip(min=0)
    assert (exact(make_ops(make, dtype).gate(both)) == exact(torch.tensor(opened * 2).to(dtype))).all()


@both
@in_every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_turn(make: MakeRowOps, dtype: torch.dtype, case: Case) -> None:
    # so small that a norm's eps shows
    qkv, (cos, sin) = draw(1, ROWS, case.width, dtype=dtype, scale=0.01), angles(2, case.head_dim)
    before = qkv.clone()
    result = run_turn(make_ops(make, dtype), case, qkv, cos, sin)
    assert torch.equal(qkv, before)
    check_turned(make, case, qkv, cos, sin, result, dtype)


@both
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_turn_other_sizes(make: MakeRowOps, case: Case) -> None:
    qkv, (cos, sin) = draw(1, ROWS, case.width, dtype=torch.bfloat16), angles(2, case.head_dim)
    result = run_turn(make_ops(make, torch.bfloat16, case.head_dim), case, qkv, cos, sin)
    check_turned(make, case, qkv, cos, sin, result, torch.bfloat16)


@both
@pytest.mark.parametrize("case", CASES[1:6:4], ids=str)
def test_turn_rounds_fp32_products(make: MakeRowOps, case: Case) -> None:
    """Some products of a 16-bit model come in fp32."""
    qkv, (cos, sin) = draw(1, ROWS, case.width), angles(2, case.head_dim)
    result = run_turn(make_ops(make, torch.bfloat16), case, qkv, cos, sin)
    check_turned(make, case, qkv, cos, sin, result, torch.bfloat16)


RowFunction = Callable[[RowOps, Tensor, Tensor, Tensor], tuple[Tensor, ...]]
COMPANY = Case(9, 3, 64, True, False, True, True)


def _norm(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return ops.add_normalise(x, x.bfloat16(), draw_whole(3, x.shape[1]))


def _gate(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return (ops.gate(x.bfloat16()),)


def _turn(ops: RowOps, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return run_turn(ops, COMPANY, x.bfloat16(), cos, sin)


functions = pytest.mark.parametrize("function", [_norm, _gate, _turn])


@both
@functions
def test_nan_stays_in_its_row(make: MakeRowOps, function: RowFunction) -> None:
    x, (cos, sin) = draw(1, ROWS, COMPANY.width), angles(2, 64)
    x[1] = torch.nan
    for part in function(make_ops(make, torch.bfloat16), x, cos, sin):
        assert part[[0, 2]].isfinite().all() and part[1].isnan().all()


@functions
def test_a_rows_bits_do_not_depend_on_its_company(function: RowFunction) -> None:
    ops = make_ops(TritonRowOps, torch.bfloat16)
    x, (cos, sin) = draw(1, ROWS, COMPANY.width), angles(2, 64)
    together = function(ops, x, cos, sin)
    for row in range(ROWS):
        alone = function(ops, *(part[row : row + 1] for part in (x, cos, sin)))
        assert all(torch.equal(one, all[row : row + 1]) for one, all in zip(alone, together, strict=True))


@both
@functions
def test_no_rows(make: MakeRowOps, function: RowFunction) -> None:
    x, (cos, sin) = draw(1, ROWS, COMPANY.width), angles(2, 64)
    for part in function(make_ops(make, torch.bfloat16), *(part[:0] for part in (x, cos, sin))):
        assert len(part) == 0


def test_triton_refuses_what_it_would_misread() -> None:
    ops = make_ops(TritonRowOps, torch.bfloat16)
    x, weight = draw(1, ROWS, 64), draw_whole(2, 64)
    with pytest.raises(ValueError, match=r"hidden is \[3, 32\] .* must be \[3, 64\]"):
        ops.normalise(x[:, :32], weight)
    with pytest.raises(ValueError, match=r"hidden is .* strides \(1, 3\).* contiguous rows"):
        ops.normalise(x.T.contiguous().T, weight)
    with pytest.raises(ValueError, match=r"delta is \[2, 64\]"):
        ops.add_normalise(x, x[:2], weight)
    with pytest.raises(ValueError, match="head_dim is 96; the Triton kernels take powers of two"):
        make_ops(TritonRowOps, torch.bfloat16, 96)
