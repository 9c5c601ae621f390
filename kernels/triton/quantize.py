"""K or V of one head of a page: ranges of its blocks, parameters, codes.

Tiles are fp32 [rows, columns] as codes are stored: a row is a token of K, a channel of V, a token of what stays raw. A
span is the fewest whole tiles that hold whole blocks. `record` points to uint8, the first byte of the layer in a page's
record; `source` to the first number of the head; `head` is int64; `side` a `Side`.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kernels.triton.encode import (
    LARGEST_BYTE,
    NO_ROW,
    encode,
    rounded_scale,
    rounded_zero,
    store_codes,
    to_float,
    to_half,
    wanted_parameters,
)
from kernels.triton.spec import LayerSpec, StoreSpec

TILE_NUMBERS = 8192  # at most; in fp32 they fit into the shared memory of every chip


@dataclass(frozen=True)
class Side:
    """K or V of a layer, cut into tiles; passed as `tl.constexpr`."""

    layer: LayerSpec
    is_key: bool

    @property
    def store(self) -> StoreSpec:
        return self.layer.k if self.is_key else self.layer.v

    @property
    def is_normed(self) -> bool:
        return self.is_key and self.layer.has_norm

    @property
    def is_by_token(self) -> bool:
        return self.is_key or self.store.is_raw

    @property
    def num_rows(self) -> int:
        return self.layer.page_tokens if self.is_by_token else self.layer.head_dim

    @property
    def num_columns(self) -> int:
        return self.layer.head_dim if self.is_by_token else self.layer.page_tokens

    @property
    def tile_numbers(self) -> int:
        return min(self.num_rows * self.num_columns, TILE_NUMBERS)

    @property
    def tile_rows(self) -> int:
        return self.tile_numbers // self.num_columns

    @property
    def group_rows(self) -> int:
        """Rows of a block."""
        return self.store.group_tokens if self.is_by_token else self.store.group_channels

    @property
    def group_columns(self) -> int:
        return self.store.group_channels if self.is_by_token else self.store.group_tokens

    @property
    def span_rows(self) -> int:
        return max(self.tile_rows, self.group_rows)

    @property
    def span_blocks(self) -> int:
        """Of a span and of a tile, which holds one row of blocks or a part of it where blocks have more rows."""
        return self.span_rows // self.group_rows

    @property
    def row_blocks(self) -> int:
        """Of a row."""
        return self.num_columns // self.group_columns


@triton.jit
def is_kept(record, tokens, layer: tl.constexpr):
    """bool: which of `tokens` [n] of the page keep their rows in 16 bit."""
    index = tl.arange(0, triton.next_power_of_2(layer.num_rows))
    places = tl.load(record + layer.row_places + index, index < layer.num_rows, other=NO_ROW).to(tl.int32)
    return tl.sum((tokens[:, None] == places[None, :]).to(tl.int32), 1) > 0


@triton.jit
def copy_kept_rows(source, token_stride, record, head, side: tl.constexpr):
    """As they are; zeros where there is none."""
    layer: tl.constexpr = side.layer
    index = tl.arange(0, triton.next_power_of_2(layer.num_rows))
    channels = tl.arange(0, layer.head_dim)[None, :]
    places = tl.load(record + layer.row_places + index, index < layer.num_rows, other=NO_ROW)
    rows = tl.load(
        source + places.to(tl.int64)[:, None] * token_stride + channels, (places != NO_ROW)[:, None], other=0.0
    )
    target = (record + (layer.k_rows if side.is_key else layer.v_rows)).to(source.dtype)
    place = (head * layer.num_rows + index)[:, None] * layer.head_dim + channels
    tl.store(target + place, rows, (index < layer.num_rows)[:, None])


@triton.jit
def load_tile(source, token_stride, first, side: tl.constexpr):
    """The tile from row `first` on, as it is."""
    rows = (first + tl.arange(0, side.tile_rows))[:, None]
    columns = tl.arange(0, side.num_columns)[None, :]
    if side.is_by_token:
        places = rows.to(tl.int64) * token_stride + columns
    else:
        places = columns.to(tl.int64) * token_stride + rows
    return tl.load(source + places)


@triton.jit
def load_numbers(source, token_stride, record, first, side: tl.constexpr):
    """The tile from row `first` on; K divided by the norms of its tokens where it has them."""
    x = to_float(load_tile(source, token_stride, first, side))
    if side.is_normed:
        norms = (record + side.layer.k_norm).to(tl.pointer_type(tl.float16)) + first + tl.arange(0, side.tile_rows)
        x = tl.div_rn(x, tl.load(norms).to(tl.float32)[:, None])
    return x


@triton.jit
def in_blocks(x, side: tl.constexpr):
    """A tile as [blocks, rows of a block, blocks, columns of a block]."""
    shape: tl.constexpr = (
        side.span_blocks,
        side.tile_rows // side.span_blocks,
        side.row_blocks,
        side.group_columns,
    )
    return tl.reshape(x, shape)


@triton.jit
def block_ranges(source, token_stride, record, first, side: tl.constexpr):
    """Smallest and largest number of each block of the span from row `first` on, fp32 [span_blocks, row_blocks]; 0
    where a block has only kept tokens."""
    layer: tl.constexpr = side.layer
    low = tl.full((side.span_blocks, side.row_blocks), float("inf"), tl.float32)
    high = tl.full((side.span_blocks, side.row_blocks), float("-inf"), tl.float32)
    for start in range(0, side.span_rows, side.tile_rows):
        x = load_numbers(source, token_stride, record, first + start, side)
        smallest, largest = x, x
        if layer.num_rows > 0:
            if side.is_key:
                is_out = is_kept(record, first + start + tl.arange(0, side.tile_rows), layer)[:, None]
            else:
                is_out = is_kept(record, tl.arange(0, side.num_columns), layer)[None, :]
            smallest, largest = tl.where(is_out, float("inf"), x), tl.where(is_out, float("-inf"), x)
        low = tl.minimum(low, tl.min(tl.min(in_blocks(smallest, side), 3), 1))
        high = tl.maximum(high, tl.max(tl.max(in_blocks(largest, side), 3), 1))
    if layer.num_rows > 0:
        is_empty = low > high
        low, high = tl.where(is_empty, 0.0, low), tl.where(is_empty, 0.0, high)
    return low, high


@triton.jit
def head_factor(source, token_stride, record, side: tl.constexpr):
    """fp16: what the scales in 8 bits of a head are multiples of."""
    store: tl.constexpr = side.store
    largest = 0.0
    for first in range(0, side.num_rows, side.span_rows):
        low, high = block_ranges(source, token_stride, record, first, side)
        scale, _ = wanted_parameters(low, high, store)
        largest = tl.maximum(largest, tl.max(tl.max(scale, 1), 0))
    return to_half(tl.div_rn(largest, LARGEST_BYTE))


@triton.jit
def store_parameter(target, value, first, head, side: tl.constexpr):
    """[span_blocks, row_blocks] of the span from row `first` on to a field [kv_heads, P / group, D / group]."""
    row = first // side.group_rows + tl.arange(0, side.span_blocks)[:, None]
    column = tl.arange(0, side.row_blocks)[None, :]
    BLOCK_ROWS: tl.constexpr = side.num_rows // side.group_rows
    place = row * side.row_blocks + column if side.is_by_token else column * BLOCK_ROWS + row
    tl.store(target + head * (BLOCK_ROWS * side.row_blocks) + place, value.to(target.dtype.element_ty))


@triton.jit
def quantize_head(source, token_stride, record, head, side: tl.constexpr):
    """Parameters are stored last: a head that is one tile is then loaded once, which no store may lie between."""
    store: tl.constexpr = side.store
    kind: tl.constexpr = tl.uint8 if store.is_byte else tl.float16
    codes_row = record + store.codes + head * (side.num_rows * side.num_columns * store.bits // 8)
    factor = to_half(1.0)
    if store.is_byte:
        factor = head_factor(source, token_stride, record, side)
    for first in range(0, side.num_rows, side.span_rows):
        if store.has_scale:
            low, high = block_ranges(source, token_stride, record, first, side)
            wanted_scale, wanted_zero = wanted_parameters(low, high, store)
            kept_scale, scale = rounded_scale(wanted_scale, factor.to(tl.float32), store)
            if store.has_zero:
                kept_zero, zero = rounded_zero(wanted_zero, scale, store)
            else:
                zero = scale * -store.centre
        for start in range(first, first + side.span_rows, side.tile_rows):
            x = load_numbers(source, token_stride, record, start, side)
            if store.has_scale:
                steps = in_blocks(x, side)
                if store.has_zero or store.centre > 0:
                    steps = steps - zero[:, None, :, None]
                x = tl.reshape(tl.div_rn(steps, scale[:, None, :, None]), (side.tile_rows, side.num_columns))
            store_codes(codes_row + start * (side.num_columns * store.bits // 8), encode(x, store), store)
        if store.has_scale:
            store_parameter((record + store.scale).to(tl.pointer_type(kind)), kept_scale, first, head, side)
        if store.has_zero:
            store_parameter((record + store.zero).to(tl.pointer_type(kind)), kept_zero, first, head, side)
    if store.is_byte:
        tl.store((record + store.factor).to(tl.pointer_type(tl.float16)) + head, factor)


@triton.jit
def copy_head(source, token_stride, record, head, side: tl.constexpr):
    """What stays in the model's dtype."""
    target = (record + side.store.codes).to(source.dtype) + head * (side.num_rows * side.num_columns)
    columns = tl.arange(0, side.num_columns)[None, :]
    for first in range(0, side.num_rows, side.tile_rows):
        if side.is_normed:
            x = load_numbers(source, token_stride, record, first, side).to(source.dtype.element_ty)
        else:
            x = load_tile(source, token_stride, first, side)
        rows = (first + tl.arange(0, side.tile_rows))[:, None]
        tl.store(target + rows * side.num_columns + columns, x)


@triton.jit
def seal_head(source, token_stride, record, head, side: tl.constexpr):
    if side.store.is_raw:
        copy_head(source, token_stride, record, head, side)
    else:
        quantize_head(source, token_stride, record, head, side)
    if side.layer.num_rows > 0:
        copy_kept_rows(source, token_stride, record, head, side)
