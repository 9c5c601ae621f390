"""What row operations must give, in float64, and how far they may be from it.

Tolerances are sums of roundings: `UNIT` for each fp32 operation on the way, times the magnitude of what it works on (no
terms cancel in it), and half a unit in the last place of the result's dtype; a whole one where Triton's interpreter,
unlike a GPU, cuts fp32 off to bfloat16.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.row_ops import MakeRowOps, RowOps, Turn
from kernels.torch_backend.row_ops import TorchRowOps
from kernels.triton.elementwise import TritonRowOps

Array = NDArray[np.float64]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
UNIT = 2.0**-24
ROWS = 3
MARGIN = 64
SENTINEL = 768.0  # in every dtype
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative
HALF_TINIEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # among subnormals


class Guard:
    """Stands in for `torch.empty`: NaN inside, so that what is left out shows, and sentinels around."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def empty(
        self, *size: int | torch.Size, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
    ) -> Tensor:
        shape = torch.Size(size[0] if isinstance(size[0], torch.Size) else size)
        buffer = torch.full((shape.numel() + 2 * MARGIN,), SENTINEL, dtype=dtype, device=device)
        self.buffers.append(buffer)
        return buffer[MARGIN:-MARGIN].view(shape).fill_(torch.nan)

    def check(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:MARGIN] == SENTINEL).all() and (buffer[-MARGIN:] == SENTINEL).all()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Rows between others of NaN, further apart than they are long."""
    values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    wide = torch.full((shape[0] + 2, *shape[1:-1], shape[-1] + 48), torch.nan)
    wide[1:-1, ..., 16:-32] = values
    return wide.to(dtype).to(DEVICE)[1:-1, ..., 16:-32]


def draw_whole(seed: int, *shape: int) -> Tensor:
    return 1 + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def exact(tensor: Tensor) -> Array:
    return tensor.double().cpu().numpy()


def check(make: MakeRowOps, result: Tensor, expected: Array, error: Array, dtype: torch.dtype) -> None:
    """`error`: what may be added up before the last rounding."""
    is_cut = make is TritonRowOps and DEVICE.type == "cpu" and dtype == torch.bfloat16
    last = HALF_ULP[dtype] * (np.abs(expected) + error) + HALF_TINIEST[dtype]
    assert result.dtype == dtype and result.shape == expected.shape
    found = exact(result)
    assert np.isfinite(found).all()
    worst = np.max(np.abs(found - expected) / (error + (2 if is_cut else 1) * last))
    assert worst <= 1, f"{worst:.3g} times the bound"


def norm_roundings(width: int) -> float:
    """A sum of squares in any order, halved by the root; root (2 ulp on a GPU), mean and eps (8); two products."""
    return width / 2 + 10


@dataclass(frozen=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_rotated: bool
    stores_before_rope: bool
    is_normed: bool
    is_balanced: bool

    @property
    def turn(self) -> Turn:
        return Turn(self.num_heads, self.num_kv_heads, self.head_dim, self.is_rotated, self.stores_before_rope)

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        shape = (self.num_heads + self.num_kv_heads, self.head_dim)
        return draw_whole(5, *shape) if self.is_normed else None, draw_whole(6, *shape) if self.is_balanced else None


def sylvester(size: int) -> Array:
    """Blocks of the largest power of two that divides `size`."""
    matrix = np.ones((1, 1))
    while size % (2 * len(matrix)) == 0:
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return np.kron(np.eye(size // len(matrix)), matrix / np.sqrt(len(matrix)))


def expected_head(
    x: Array, cos: Array, sin: Array, norm: Array | None, factors: Array | None, has_rope: bool, is_rotated: bool
) -> tuple[Array, Array]:
    """A head's row, [D], and how far fp32 may be from it."""
    size, half = len(x), len(x) // 2
    roundings, magnitude = 0.0, np.abs(x)
    if norm is not None:
        scale = 1 / np.sqrt(np.mean(x * x) + EPS)
        x, magnitude, roundings = x * scale * norm, magnitude * scale * np.abs(norm), norm_roundings(size)
    if has_rope:
        rotated, size_of = np.zeros(size), np.zeros(size)
        for pair in range(half):
            left, right = x[pair], x[pair + half]
            rotated[pair] = left * cos[pair] - right * sin[pair]
            rotated[pair + half] = right * cos[pair] + left * sin[pair]
            size_of[pair] = magnitude[pair] * abs(cos[pair]) + magnitude[pair + half] * abs(sin[pair])
            size_of[pair + half] = magnitude[pair + half] * abs(cos[pair]) + magnitude[pair] * abs(sin[pair])
        x, magnitude, roundings = rotated, size_of, roundings + 2
    if factors is not None:
        x, magnitude, roundings = x * factors, magnitude * np.abs(factors), roundings + 1
    if is_rotated:  # a sum of D numbers in any order, and the matrix's rounded entries or the factor at the end
        matrix = sylvester(size)
        x, magnitude, roundings = x @ matrix, magnitude @ np.abs(matrix), roundings + size + 2
    return x, roundings * UNIT * magnitude


def check_turned(
    make: MakeRowOps,
    case: Case,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    result: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> None:
    norm, factors = (None if weight is None else exact(weight) for weight in case.weights())
    heads = exact(qkv).reshape(len(qkv), -1, case.head_dim)
    expected, errors = np.zeros(heads.shape), np.zeros(heads.shape)
    for row, head in np.ndindex(*heads.shape[:2]):
        is_q, is_v = head < case.num_heads, head >= case.num_heads + case.num_kv_heads
        if is_v:
            expected[row, head] = heads[row, head]
            continue
        expected[row, head], errors[row, head] = expected_head(
            heads[row, head],
            exact(cos)[row, 0],
            exact(sin)[row, 0],
            None if norm is None else norm[head],
            None if factors is None else factors[head],
            is_q or not case.stores_before_rope,
            case.is_rotated and not (is_q and case.stores_before_rope),
        )
    starts = (0, case.num_heads, case.num_heads + case.num_kv_heads, heads.shape[1])
    dtypes = (torch.float32, dtype, dtype)
    for part, start, end, kind in zip(result, starts, starts[1:], dtypes, strict=False):
        check(make, part, expected[:, start:end], errors[:, start:end], kind)


def check_norm(make: MakeRowOps, result: Tensor, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    x, w = exact(hidden), exact(weight)
    expected = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS) * w
    check(make, result, expected, norm_roundings(x.shape[-1]) * UNIT * np.abs(expected), dtype)


def check_gate(make: MakeRowOps, result: Tensor, both: Tensor, dtype: torch.dtype) -> None:
    """`both`: gate beside up, which were handed in."""
    gate, up = np.split(exact(both), 2, -1)
    silu = gate / (1 + np.exp(-gate))
    # the exponent's error grows with the gate; exp and the quotient are 2 ulp each on a GPU
    error = (2 * np.abs(gate) + 12) * UNIT * np.abs(silu * up)
    if make is TorchRowOps:  # rounds silu(gate) to the inputs' dtype
        half_ulp = HALF_ULP[both.dtype]
        error += (half_ulp * np.abs(silu) + HALF_TINIEST[both.dtype]) * np.abs(up) * (1 + half_ulp)
    check(make, result, silu * up, error, dtype)


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
