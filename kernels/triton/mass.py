"""Attention mass: the softmax weight that observed queries give to a page, summed in whole units, so that the order of
sums is irrelevant."""

import triton
import triton.language as tl


@triton.jit
def mass_kernel(
    page_stats, row_stats, entries, sums, H: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, G: tl.constexpr
):
    """Adds one layer's mass of one page to `sums`, int64, in units of 2^-32.

    entries: int32 [n, 5]: number of the page in `page_stats`, fp32 [pages, kv_heads, 2, R]; that of its tile in
    `row_stats`, of the same form: largest logits and totals; where in `sums`; first observed row and their end. ROWS, a
    power of two of at least R. Rows are (place, query), G queries and padding up to a power of two.
    """
    field = entries + tl.program_id(0) * 5
    page = page_stats + tl.load(field).to(tl.int64) * (H * 2 * R)
    tile = row_stats + tl.load(field + 1).to(tl.int64) * (H * 2 * R)
    row = tl.arange(0, ROWS)
    GROUP: tl.constexpr = triton.next_power_of_2(G)
    is_seen = (row % GROUP < G) & (row >= tl.load(field + 3)) & (row < tl.load(field + 4))
    units = tl.zeros((ROWS,), tl.int64)
    for head in range(H):
        at = head * (2 * R) + row
        largest = tl.load(tile + at, mask=is_seen, other=0.0)
        total = tl.load(tile + at + R, mask=is_seen, other=1.0)
        added = tl.load(page + at + R, mask=is_seen, other=0.0)
        share = added * tl.exp2(tl.load(page + at, mask=is_seen, other=0.0) - largest) / total
        units += (share * 4294967296.0 + 0.5).to(tl.int64)
    tl.atomic_add(sums + tl.load(field + 2), tl.sum(units, 0), sem="relaxed")
