"""Attention of tiles of queries that share their pages: rows of one page of a prefill chunk, or one decode row in its
page where results must not depend on how a text was cut."""

import triton
import triton.language as tl

from kernels.triton.attend import attend_16bit, attend_sealed, load_queries, start, store_stats


@triton.jit
def prefill_kernel(
    q,
    k,
    v,
    tiles,
    pages,
    numbers,
    sealed,
    open_k,
    open_v,
    codebooks,
    cos,
    sin,
    out,
    page_stats,
    tile_stats,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    out_row_stride,
    page_bytes,
    slot_stride,
    scale,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    MODEL: tl.constexpr,
    OWN_IN_SLOT: tl.constexpr,
    HAS_MASS: tl.constexpr,
):
    """TOKENS places of one page under the G queries of a KV head each.

    tiles: int32 [n, 12]: row of place 0 of the page, first place of the tile, first place that has a query, end of
    those, tokens in the page, its slot, its number in the sequence, first of the slots before it in `pages`, number of
    them, first of the sealed pages before it, number of them, first of its `page_stats`. The page's own K and V are
    rows of `k` and `v`, or in its slot where OWN_IN_SLOT. page_stats: fp32 [entries, kv_heads, 2, M], for slots, sealed
    pages and the own page in turn: largest logit and what the page added, of rows with a query; tile_stats: fp32
    [n, kv_heads, 2, M], the last largest logit and the total. Both only where HAS_MASS and, for the first, the tile's
    field is not negative. Rows are (place, query); M = TOKENS * GROUP, GROUP a power of two of at least G.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    H: tl.constexpr = layer.num_kv_heads
    D: tl.constexpr = layer.head_dim
    P: tl.constexpr = layer.page_tokens
    C: tl.constexpr = tiling.channels
    BLOCKS: tl.constexpr = D // C
    M: tl.constexpr = TOKENS * GROUP
    field = tiles + tile * 12
    own_row = tl.load(field).to(tl.int64)
    first_place = tl.load(field + 1)
    first_query = tl.load(field + 2)
    end_query = tl.load(field + 3)
    num_tokens = tl.load(field + 4)
    own_number = tl.load(field + 6).to(tl.int64)
    first_slot = tl.load(field + 7)
    num_slots = tl.load(field + 8)
    first_page = tl.load(field + 9)
    num_pages = tl.load(field + 10)
    entry = tl.load(field + 11)
    index = tl.arange(0, M)
    query = index % GROUP
    place = first_place + index // GROUP
    is_row = (query < G) & (place >= first_query) & (place < end_query)
    starts = q + (own_row + place) * q_row_stride + (head * G + query).to(tl.int64) * q_head_stride
    queries = load_queries(starts, is_row, layer, tiling, M, scale, DTYPE)
    acc, largest, total = start(layer, tiling, M)
    sees_all = tl.full((M,), P, tl.int32)
    turn_stride = P * (D // 2)
    is_stored = is_row & (entry >= 0)
    where = page_stats + entry.to(tl.int64) * (H * 2 * M) + head * (2 * M) + index
    for item in tl.range(first_slot, first_slot + num_slots, num_stages=1):
        offset = tl.load(pages + item).to(tl.int64) * slot_stride + head * (P * D)
        number = tl.load(numbers + item).to(tl.int64) * turn_stride if layer.before_rope else 0
        acc, largest, total, added = attend_16bit(
            queries, acc, largest, total, open_k + offset, open_v + offset, D, D, P, sees_all,
            cos + number, sin + number, layer, tiling, DTYPE, M,
        )  # fmt: skip
        if HAS_MASS:
            store_stats(where, largest, added, is_stored, M)
            where += H * 2 * M
    for item in range(first_page, first_page + num_pages):
        record = sealed + tl.load(pages + item).to(tl.int64) * page_bytes
        number = tl.load(numbers + item).to(tl.int64) * turn_stride if layer.before_rope else 0
        acc, largest, total, added = attend_sealed(
            queries, acc, largest, total, record, head, codebooks, cos + number, sin + number,
            layer, tiling, DTYPE, MODEL, M,
        )  # fmt: skip
        if HAS_MASS:
            store_stats(where, largest, added, is_stored, M)
            where += H * 2 * M
    number = own_number * turn_stride if layer.before_rope else 0
    last_seen = tl.minimum(place, num_tokens - 1)
    if OWN_IN_SLOT:
        offset = tl.load(field + 5).to(tl.int64) * slot_stride + head * (P * D)
        acc, largest, total, added = attend_16bit(
            queries, acc, largest, total, open_k + offset, open_v + offset, D, D, num_tokens, last_seen,
            cos + number, sin + number, layer, tiling, DTYPE, M,
        )  # fmt: skip
    else:
        own_k = k + own_row * k_row_stride + head * k_head_stride
        own_v = v + own_row * v_row_stride + head * v_head_stride
        acc, largest, total, added = attend_16bit(
            queries, acc, largest, total, own_k, own_v, k_row_stride, v_row_stride, num_tokens, last_seen,
            cos + number, sin + number, layer, tiling, DTYPE, M,
        )  # fmt: skip
    if HAS_MASS:
        store_stats(where, largest, added, is_stored, M)
        store_stats(tile_stats + (tile.to(tl.int64) * H + head) * (2 * M) + index, largest, total, is_row, M)
    for block in tl.static_range(BLOCKS):
        channels = block * C + tl.arange(0, C)
        to = out + (own_row + place)[:, None] * out_row_stride + ((head * G + query) * D)[:, None] + channels[None, :]
        tl.store(to, acc[block] / total[:, None], mask=is_row[:, None])
