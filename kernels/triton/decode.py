"""Attention of decode rows: splits of a fixed number of pages, one program a split and KV head, then a combine.

A split's bounds follow from the row's own pages alone, so a row's result does not depend on its company.
"""

import triton
import triton.language as tl

from kernels.triton.attend import attend_16bit, attend_sealed, load_queries, of_others, of_queries, start, store_stats


@triton.jit
def decode_kernel(
    q,
    splits,
    pages,
    numbers,
    sealed,
    open_k,
    open_v,
    codebooks,
    cos,
    sin,
    values,
    stats,
    page_stats,
    q_row_stride,
    q_head_stride,
    page_bytes,
    slot_stride,
    scale,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    DTYPE: tl.constexpr,
    MODEL: tl.constexpr,
    HAS_MASS: tl.constexpr,
):
    """One split of one row under the G queries of a KV head.

    splits: int32 [n, 6]: row, first of its slots in `pages`, number of slots, first of its sealed pages, number of
    them, tokens in the last slot. pages, numbers: int32 ids, and which pages of their sequences they are. values: fp32
    [n, kv_heads, G, D], weighted but not divided by the total; stats: fp32 [n, kv_heads, 2, G], largest logit and
    total; page_stats: fp32 [pages, kv_heads, 2, G], the same after each page, where HAS_MASS.
    """
    split = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    H: tl.constexpr = layer.num_kv_heads
    D: tl.constexpr = layer.head_dim
    P: tl.constexpr = layer.page_tokens
    C: tl.constexpr = tiling.channels
    BLOCKS: tl.constexpr = D // C
    field = splits + split * 6
    row = tl.load(field).to(tl.int64)
    first_slot = tl.load(field + 1)
    num_slots = tl.load(field + 2)
    first_page = tl.load(field + 3)
    num_pages = tl.load(field + 4)
    last_tokens = tl.load(field + 5)
    query = tl.arange(0, M)
    is_row = query < G
    starts = q + row * q_row_stride + (head * G + query).to(tl.int64) * q_head_stride
    queries = load_queries(starts, is_row, layer, tiling, M, scale, DTYPE)
    acc, largest, total = start(layer, tiling, M)
    turn_stride = P * (D // 2)
    for place in tl.range(first_slot, first_slot + num_slots, num_stages=1):
        tile = tl.load(pages + place).to(tl.int64) * slot_stride + head * (P * D)
        number = tl.load(numbers + place).to(tl.int64) * turn_stride if layer.before_rope else 0
        num_tokens = tl.where(place == first_slot + num_slots - 1, last_tokens, P)
        last_seen = tl.zeros((M,), tl.int32) + num_tokens - 1
        acc, largest, total, added = attend_16bit(
            queries, acc, largest, total, open_k + tile, open_v + tile, D, D, num_tokens, last_seen,
            cos + number, sin + number, layer, tiling, DTYPE, M,
        )  # fmt: skip
        if HAS_MASS:
            store_stats(page_stats + (place * H + head) * (2 * G) + query, largest, added, is_row, G)
    for place in range(first_page, first_page + num_pages):
        record = sealed + tl.load(pages + place).to(tl.int64) * page_bytes
        number = tl.load(numbers + place).to(tl.int64) * turn_stride if layer.before_rope else 0
        acc, largest, total, added = attend_sealed(
            queries, acc, largest, total, record, head, codebooks, cos + number, sin + number,
            layer, tiling, DTYPE, MODEL, M,
        )  # fmt: skip
        if HAS_MASS:
            store_stats(page_stats + (place * H + head) * (2 * G) + query, largest, added, is_row, G)
    place = split * H + head
    for block in tl.static_range(BLOCKS):
        channels = block * C + tl.arange(0, C)
        where = values + of_queries((place * G + query) * D, tiling) + of_others(channels, tiling)
        tl.store(where, acc[block], mask=of_queries(is_row, tiling))
    store_stats(stats + place * (2 * G) + query, largest, total, is_row, G)


@triton.jit
def combine_kernel(
    values,
    stats,
    first_split,
    out,
    row_stats,
    out_row_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The splits of one row and KV head. first_split: int32 [rows + 1]. out: fp32 [rows, heads, D]; row_stats: fp32
    [rows, kv_heads, 2, G]. GROUP: a power of two of at least G."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    query = tl.arange(0, GROUP)
    channels = tl.arange(0, D)
    is_row = query < G
    largest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, D), tl.float32)
    for split in range(tl.load(first_split + row), tl.load(first_split + row + 1)):
        place = split * H + head
        theirs = tl.load(stats + place * (2 * G) + query, mask=is_row, other=0.0)
        new = tl.maximum(largest, theirs)
        mine = tl.exp2(largest - new)
        weight = tl.exp2(theirs - new)
        part = tl.load(values + (place * G + query)[:, None] * D + channels[None, :], mask=is_row[:, None], other=0.0)
        total = total * mine + tl.load(stats + place * (2 * G) + G + query, mask=is_row, other=1.0) * weight
        acc = acc * mine[:, None] + part * weight[:, None]
        largest = new
    where = out + row.to(tl.int64) * out_row_stride + (head * G + query)[:, None] * D + channels[None, :]
    divisor = tl.where(total > 0.0, total, 1.0)  # a row that pads a step has no split
    tl.store(where, acc / divisor[:, None], mask=is_row[:, None])
    store_stats(row_stats + (row.to(tl.int64) * H + head) * (2 * G) + query, largest, total, is_row, G)
