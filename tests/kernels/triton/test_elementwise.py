"""Row operations, in PyTorch, in Triton and compiled for CPUs, against float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.build import paths
from kernels.cpu.row_ops import CompiledRowOps
from kernels.format.hadamard import hadamard
from kernels.row_ops import MakeRowOps, RowOps
from kernels.torch_backend.row_ops import TorchRowOps
from kernels.triton.elementwise import TritonRowOps
from tests.kernels.compiled import kernel_path
from tests.kernels.triton.row_checks import (
    DEVICE,
    EPS,
    HALF_TINIEST,
    HALF_ULP,
    UNIT,
    Case,
    check,
    check_turned,
    draw,
    draw_whole,
    exact,
    norm_roundings,
)

DTYPES = tuple(HALF_ULP)
ROWS = 3
MARGIN = 64
SENTINEL = 768.0  # in every dtype

in_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class CompiledWay:
    """The compiled operations of one instruction set."""

    name: str

    def __call__(self, dtype: torch.dtype, eps: float, rotation: Tensor) -> RowOps:
        return CompiledRowOps(kernel_path(self.name), dtype, eps)

    def __str__(self) -> str:
        return self.name


WAYS = [TorchRowOps, TritonRowOps, *(CompiledWay(name) for name in paths())]
in_every_way = pytest.mark.parametrize("make", WAYS, ids=str)


class Guard:
    """Stands in for `torch.empty`: NaN inside, so that what is left out shows, and sentinels around."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(
        self, *size: int | torch.Size, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], torch.Size) else size)
        buffer = torch.full((shape.numel() + 2 * MARGIN,), SENTINEL, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[MARGIN:-MARGIN].view(shape).fill_(torch.nan)

    def check(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:MARGIN] == SENTINEL).all() and (buffer[-MARGIN:] == SENTINEL).all()


@pytest.fixture(autouse=True)
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    guard = Guard()
    monkeypatch.setattr(torch, "empty", guard.empty)
    yield guard
    guard.check()


def make_ops(make: MakeRowOps, dtype: torch.dtype, head_dim: int = 64) -> RowOps:
    return make(dtype, EPS, torch.tensor(hadamard(head_dim), device=DEVICE))


def product_dtype(make: MakeRowOps, dtype: torch.dtype) -> torch.dtype:
    """Of what goes into a product."""
    return torch.float32 if isinstance(make, CompiledWay) else dtype


def check_norm(make: MakeRowOps, result: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    x, w = exact(hidden), exact(weight)
    expected = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * w
    check(make, result, expected, norm_roundings(x.shape[-1]) * UNIT * np.abs(expected), product_dtype(make, dtype))


@in_every_way
@in_every_dtype
@pytest.mark.parametrize("width", [16, 96, 576, 1024, 1536])
def test_normalise(make: MakeRowOps, dtype: torch.dtype, width: int) -> None:
    hidden, weight = draw(1, ROWS, width, scale=3.0), draw_whole(2, width)
    check_norm(make, make_ops(make, dtype).normalise(hidden, weight), hidden, weight, dtype)


@in_every_way
@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_normalise_far_from_one(make: MakeRowOps, scale: float) -> None:
    hidden, weight = draw(1, ROWS, 96, scale=scale), draw_whole(2, 96)
    check_norm(make, make_ops(make, torch.float32).normalise(hidden, weight), hidden, weight, torch.float32)


@in_every_way
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


@in_every_way
@in_every_dtype
@pytest.mark.parametrize("width", [48, 1536])
def test_gate(make: MakeRowOps, dtype: torch.dtype, width: int) -> None:
    both = draw(1, ROWS, 2 * width, dtype=dtype, scale=10.0)
    gate, up = np.split(exact(both), 2, -1)
    silu = gate / (1 + np.exp(-gate))
    # the exponent's error grows with the gate; exp and the quotient are 2 ulp each on a GPU
    error = (2 * np.abs(gate) + 12) * UNIT * np.abs(silu * up)
    if make is TorchRowOps:  # rounds silu(gate) to the inputs' dtype
        error += (HALF_ULP[dtype] * np.abs(silu) + HALF_TINIEST[dtype]) * np.abs(up) * (1 + HALF_ULP[dtype])
    check(make, make_ops(make, dtype).gate(both), silu * up, error, product_dtype(make, dtype))


@in_every_way
@in_every_dtype
@pytest.mark.filterwarnings("ignore:overflow")  # of exp, in the interpreter
def test_gates_far_from_zero_are_shut_or_open(make: MakeRowOps, dtype: torch.dtype) -> None:
    gate = torch.tensor([-10000.0, -200.0, 0.0, 200.0, 10000.0], device=DEVICE)
    both = torch.cat([gate, torch.full_like(gate, 2.0)]).repeat(ROWS, 1).to(dtype)
    opened = exact(both)[:, :5].clip(min=0)
    expected = torch.tensor(opened * 2).to(dtype)
    assert (exact(make_ops(make, dtype).gate(both)) == exact(expected)).all()


OPTIONS = [
    (rotated, before, normed, balanced)
    for rotated in (False, True)
    for before in (False, True)
    for normed in (False, True)
    for balanced in (False, True)
    if not (before and balanced)
]
CASES = [Case(9, 3, 64, *options) for options in OPTIONS]
SHAPES = [Case(*shape, True, False, True, True) for shape in ((4, 4, 16), (8, 2, 32), (5, 1, 128), (2, 1, 256))]


def angles(seed: int, head_dim: int) -> tuple[Tensor, Tensor]:
    turned = draw(seed, ROWS, 1, head_dim // 2, scale=5.0)
    return turned.cos(), turned.sin()


def run_turn(ops: RowOps, case: Case, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ops.turn(case.turn, qkv, cos, sin, *case.weights())


@in_every_way
@in_every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_turn(make: MakeRowOps, dtype: torch.dtype, case: Case) -> None:
    # so small that a norm's eps shows
    qkv, (cos, sin) = draw(1, ROWS, case.width, dtype=dtype, scale=0.01), angles(2, case.head_dim)
    before = qkv.clone()
    result = run_turn(make_ops(make, dtype), case, qkv, cos, sin)
    assert torch.equal(qkv, before)
    check_turned(make, case, qkv, cos, sin, result, dtype)


@in_every_way
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_turn_other_sizes(make: MakeRowOps, case: Case) -> None:
    qkv, (cos, sin) = draw(1, ROWS, case.width, dtype=torch.bfloat16), angles(2, case.head_dim)
    result = run_turn(make_ops(make, torch.bfloat16, case.head_dim), case, qkv, cos, sin)
    check_turned(make, case, qkv, cos, sin, result, torch.bfloat16)


@in_every_way
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


@in_every_way
@functions
def test_nan_stays_in_its_row(make: MakeRowOps, function: RowFunction) -> None:
    x, (cos, sin) = draw(1, ROWS, COMPANY.width), angles(2, 64)
    x[1] = torch.nan
    for part in function(make_ops(make, torch.bfloat16), x, cos, sin):
        assert part[[0, 2]].isfinite().all() and part[1].isnan().all()


@functions
@pytest.mark.parametrize("make", WAYS[1:], ids=str)
def test_a_rows_bits_do_not_depend_on_its_company(make: MakeRowOps, function: RowFunction) -> None:
    ops = make_ops(make, torch.bfloat16)
    x, (cos, sin) = draw(1, ROWS, COMPANY.width), angles(2, 64)
    together = function(ops, x, cos, sin)
    for row in range(ROWS):
        alone = function(ops, *(part[row : row + 1] for part in (x, cos, sin)))
        assert all(torch.equal(one, all[row : row + 1]) for one, all in zip(alone, together, strict=True))


@in_every_way
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
