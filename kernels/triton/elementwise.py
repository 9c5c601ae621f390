"""Row operations in Triton: everything is read once, computed in fp32 and rounded once.

A row's numbers do not depend on how many rows there are: how a row is cut and summed follows from its width alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.row_ops import Turn

GATE_BLOCK = 1024  # 16 bytes of 16-bit numbers for each of 128 threads
GATE_WARPS = 4
TURN_BLOCK = 512  # numbers of a program of one warp: 16 bytes of each half of a head for every thread
NORM_BLOCK = 512  # numbers of a row for each warp
MAX_NORM_WARPS = 16


@triton.jit
def normalise_row(
    hidden, delta, weight, total, normalised, hidden_row, delta_row, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. With `delta`, it is added first and the sum kept in `total`; else both are None."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    x = tl.load(hidden + row * hidden_row + columns, is_inside, other=0.0).to(tl.float32)
    if delta is not None:
        x += tl.load(delta + row * delta_row + columns, is_inside, other=0.0).to(tl.float32)
        tl.store(total + row * WIDTH + columns, x, is_inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    result = x * scale * tl.load(weight + columns, is_inside, other=0.0)
    tl.store(normalised + row * WIDTH + columns, result.to(normalised.dtype.element_ty), is_inside)


@triton.jit
def gate_row(gate_up, result, gate_up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """`BLOCK` columns of one row: the gate in columns up to `WIDTH`, up in those behind."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < WIDTH
    source = gate_up + row * gate_up_row + columns
    gate = tl.load(source, is_inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, is_inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(result + row * WIDTH + columns, product.to(result.dtype.element_ty), is_inside)


@triton.jit
def transform_heads(x, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """The Walsh-Hadamard transform of each row of fp32 [HEADS, WIDTH], before division by sqrt(WIDTH).

    Sums and differences of pairs, log2(WIDTH) times. A dot with the matrix compiles to ten times the instructions.
    """
    STAGES: tl.constexpr = WIDTH.bit_length() - 1
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, [HEADS * WIDTH // (2 << stage), 2, 1 << stage])
        first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), [HEADS, WIDTH])
    return x


@triton.jit
def turn_heads(
    source,
    cos,
    sin,
    norm,
    balance,
    target,
    first_head,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):
    """`HEADS` of a row's `NUM_HEADS` heads, from `first_head` on. Pointers are to the row's and the weights' head 0."""
    HALF: tl.constexpr = HEAD_DIM // 2
    channels = tl.arange(0, HALF)
    heads = first_head + tl.arange(0, HEADS)
    left_part = heads[:, None] * HEAD_DIM + channels[None, :]
    right_part = left_part + HALF
    is_inside = (heads < NUM_HEADS)[:, None]
    left = tl.load(source + left_part, is_inside, other=0.0).to(tl.float32)
    right = tl.load(source + right_part, is_inside, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(left * left + right * right, 1) / HEAD_DIM + eps)[:, None]
        left = left * scale * tl.load(norm + left_part, is_inside, other=0.0)
        right = right * scale * tl.load(norm + right_part, is_inside, other=0.0)
    if HAS_ROPE:
        cosines = tl.load(cos + channels)[None, :]
        sines = tl.load(sin + channels)[None, :]
        left, right = left * cosines - right * sines, right * cosines + left * sines
        if balance is not None:
            left = left * tl.load(balance + left_part, is_inside, other=0.0)
            right = right * tl.load(balance + right_part, is_inside, other=0.0)
    if IS_ROTATED:
        # the matrix's last stage comes first: then both halves turn alone
        left, right = left + right, left - right
        left = transform_heads(left, HEADS, HALF) * HEAD_DIM**-0.5
        right = transform_heads(right, HEADS, HALF) * HEAD_DIM**-0.5
    tl.store(target + left_part, left.to(target.dtype.element_ty), is_inside)
    tl.store(target + right_part, right.to(target.dtype.element_ty), is_inside)


@triton.jit
def turn_row(
    qkv,
    cos,
    sin,
    norm,
    balance,
    q,
    k,
    qkv_row,
    cos_row,
    sin_row,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    IS_Q_ROTATED: tl.constexpr,
    IS_K_ROTATED: tl.constexpr,
    HAS_K_ROPE: tl.constexpr,
):
    """`HEADS` heads of Q or of K of one row; of Q alone where `k` is None."""
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = 0 if k is None else (NUM_KV_HEADS + HEADS - 1) // HEADS
    row = (tl.program_id(0) // (Q_BLOCKS + K_BLOCKS)).to(tl.int64)
    block = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS)
    qkv += row * qkv_row
    cos += row * cos_row
    sin += row * sin_row
    q += row * NUM_HEADS * HEAD_DIM
    if block < Q_BLOCKS:
        turn_heads(qkv, cos, sin, norm, balance, q, block * HEADS, eps, NUM_HEADS, HEAD_DIM, HEADS, True, IS_Q_ROTATED)
    elif k is not None:
        qkv += NUM_HEADS * HEAD_DIM
        k += row * NUM_KV_HEADS * HEAD_DIM
        if norm is not None:
            norm += NUM_HEADS * HEAD_DIM
        if balance is not None:
            balance += NUM_HEADS * HEAD_DIM
        first_head = (block - Q_BLOCKS) * HEADS
        turn_heads(
            qkv, cos, sin, norm, balance, k, first_head, eps, NUM_KV_HEADS, HEAD_DIM, HEADS, HAS_K_ROPE, IS_K_ROTATED
        )


class TritonRowOps:
    """Tensors may have any distance between rows; a row's numbers lie next to each other, or ValueError."""

    def __init__(self, dtype: torch.dtype, eps: float, rotation: Tensor):
        """`rotation` gives the size of heads, a power of two; kernels have the matrix in their order of sums."""
        self._dtype = dtype
        self._eps = eps
        self._head_dim = len(rotation)
        if self._head_dim & (self._head_dim - 1):
            raise ValueError(f"head_dim is {self._head_dim}; the Triton kernels take powers of two")

    def normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._normalise(hidden, None, weight, None)

    def add_normalise(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        _check("delta", delta, (len(hidden), len(weight)))
        total = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        return total, self._normalise(hidden, delta, weight, total)

    def turn(
        self, turn: Turn, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, qk_balance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, head_dim = len(qkv), self._head_dim
        _check("qkv", qkv, (rows, turn.num_projected * head_dim))
        for name, table in (("cos", cos), ("sin", sin)):
            _check(name, table, (rows, 1, head_dim // 2))
        heads = qkv.view(rows, turn.num_projected, head_dim)
        q = torch.empty(rows, turn.num_heads, head_dim, dtype=torch.float32, device=qkv.device)
        k = None
        if qk_norm is not None or turn.is_rotated or not turn.stores_before_rope:
            k = torch.empty(rows, turn.num_kv_heads, head_dim, dtype=self._dtype, device=qkv.device)
        size = max(1, TURN_BLOCK // head_dim)
        blocks = triton.cdiv(turn.num_heads, size) + (0 if k is None else triton.cdiv(turn.num_kv_heads, size))
        turn_row[(rows * blocks,)](
            qkv,
            cos,
            sin,
            qk_norm,
            None if turn.stores_before_rope else qk_balance,
            q,
            k,
            qkv.stride(0),
            cos.stride(0),
            sin.stride(0),
            self._eps,
            NUM_HEADS=turn.num_heads,
            NUM_KV_HEADS=turn.num_kv_heads,
            HEAD_DIM=head_dim,
            HEADS=size,
            IS_Q_ROTATED=turn.is_q_rotated,
            IS_K_ROTATED=turn.is_rotated,
            HAS_K_ROPE=not turn.stores_before_rope,
            num_warps=1,
        )
        k = heads[:, turn.num_heads : turn.num_turned].to(self._dtype) if k is None else k
        return q, k, heads[:, turn.num_turned :].to(self._dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        _check("gate_up", gate_up, (rows, 2 * width))
        result = torch.empty(rows, width, dtype=self._dtype, device=gate_up.device)
        grid = (rows, triton.cdiv(width, GATE_BLOCK))
        gate_row[grid](gate_up, result, gate_up.stride(0), WIDTH=width, BLOCK=GATE_BLOCK, num_warps=GATE_WARPS)
        return result

    def _normalise(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, total: Tensor | None) -> Tensor:
        rows, width = len(hidden), len(weight)
        _check("hidden", hidden, (rows, width))
        result = torch.empty(rows, width, dtype=self._dtype, device=hidden.device)
        block = triton.next_power_of_2(width)
        normalise_row[(rows,)](
            hidden,
            delta,
            weight,
            total,
            result,
            hidden.stride(0),
            0 if delta is None else delta.stride(0),
            self._eps,
            WIDTH=width,
            BLOCK=block,
            num_warps=min(MAX_NORM_WARPS, max(1, block // NORM_BLOCK)),
        )
        return result


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape or tensor.stride(-1) != 1:
        found = f"{list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name} is {found}; it must be {list(shape)} with contiguous rows")
