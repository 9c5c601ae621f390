"""K and V of rows to their places in slots."""

import triton
import triton.language as tl


@triton.jit
def append_kernel(
    k,
    v,
    writes,
    open_k,
    open_v,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    slot_stride,
    P: tl.constexpr,
    D: tl.constexpr,
):
    """One row and KV head. writes: int32 [n, 3]: row, slot, place in it."""
    field = writes + tl.program_id(0) * 3
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(field).to(tl.int64)
    target = tl.load(field + 1).to(tl.int64) * slot_stride + (head * P + tl.load(field + 2)) * D
    channels = tl.arange(0, D)
    tl.store(open_k + target + channels, tl.load(k + row * k_row_stride + head * k_head_stride + channels))
    tl.store(open_v + target + channels, tl.load(v + row * v_row_stride + head * v_head_stride + channels))
