"""Parts of a sealed page as tiles: codes and parameters to numbers of the dtype that is multiplied in.

Everywhere: `record` points to uint8, the first byte of a layer in a page's record; `layer` is its `LayerSpec`; `head` a
KV head; `codebooks` points to `codebook_values`; `MODEL` is the model's dtype; `DTYPE` that of tiles: the model's where
K and V stay raw or it is fp32, else fp16.
"""

import triton
import triton.language as tl

from kernels.triton.parameters import head_factor, scales_and_zeros


@triton.jit
def numbers(code, codebooks, store: tl.constexpr, DTYPE: tl.constexpr):
    """uint8 codes as numbers. By bits: converting integers costs a GPU four times as much as other instructions."""
    if store.is_table:
        x = tl.load(codebooks + store.table_place + code.to(tl.int32))
    elif store.is_float8:
        if store.exponent_bits == 5:  # the upper byte of fp16
            x = (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
        else:  # the bias of e4m3 is smaller by 8 than that of fp16
            x = (((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)).to(tl.float16, bitcast=True)
            x = x * 256.0
    else:
        x = (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    return x.to(DTYPE)


@triton.jit
def dequantized(
    x,
    record,
    head,
    t: tl.constexpr,
    T: tl.constexpr,
    c: tl.constexpr,
    C: tl.constexpr,
    store: tl.constexpr,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    IS_KEY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Numbers of these tokens and channels as values. The head's factor is left out where no token keeps its row."""
    if store.has_scale:
        scale, zero = scales_and_zeros(record, head, t, T, c, C, store, layer, tiling, IS_KEY, DTYPE)
        x = x * scale + zero
        if store.is_byte and layer.num_rows > 0:
            x = x * head_factor(record, head, store).to(DTYPE)
    return x


@triton.jit
def load_codes(row, column: tl.constexpr, N: tl.constexpr):
    """What makes N columns from `column` on of each plane: bytes of rows that `row` [rows, 1] points to; with 3 bits,
    those of the two low ones."""
    return tl.load(row + (column + tl.arange(0, N))[None, :])


@triton.jit
def plane(
    low,
    row,
    column: tl.constexpr,
    part: tl.constexpr,
    N: tl.constexpr,
    store: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """uint8 codes of plane `part` of rows of LENGTH codes, from what `load_codes` gave."""
    if store.bits == 8:
        code = low
    elif store.bits == 3:
        # the bytes of high bits hold eight planes, so two of them go with each plane of the low bits
        places = column + tl.arange(0, N)
        high = tl.load(row + LENGTH // 4 + (places % (LENGTH // 8))[None, :])
        shift = (2 * part + places // (LENGTH // 8))[None, :].to(tl.uint8)
        code = ((low >> (2 * part)) & 3) | (((high >> shift) & 1) << 2)
    else:
        code = (low >> (part * store.bits)) & ((1 << store.bits) - 1)
    return code


@triton.jit
def plane_numbers(
    low,
    codebooks,
    row,
    column: tl.constexpr,
    part: tl.constexpr,
    N: tl.constexpr,
    store: tl.constexpr,
    LENGTH: tl.constexpr,
    layer: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Numbers of plane `part`; the other arguments are those of `plane`."""
    if store.is_table or layer.is_interpreted:
        x = numbers(plane(low, row, column, part, N, store, LENGTH), codebooks, store, DTYPE)
    else:
        code = plane(low, row, column, part, N, store, LENGTH) if store.bits == 3 else low
        unpacker: tl.constexpr = store.unpackers[0 if store.bits == 3 else part]
        x = tl.inline_asm_elementwise(unpacker, "=&r,=&r,r", [code], dtype=tl.float16, is_pure=True, pack=4).to(DTYPE)
    return x


@triton.jit
def load_keys(
    record,
    head,
    codebooks,
    t: tl.constexpr,
    T: tl.constexpr,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    DTYPE: tl.constexpr,
    MODEL: tl.constexpr,
):
    """K of T tokens from `t` on as `key_parts` tiles [T, D / parts], as stored: without factor and norm."""
    store: tl.constexpr = layer.k
    D: tl.constexpr = layer.head_dim
    PARTS: tl.constexpr = tiling.key_parts
    KEPT: tl.constexpr = layer.num_rows
    C: tl.constexpr = D // PARTS
    tokens = t + tl.arange(0, T)
    channels = tl.arange(0, C)
    row_number = (head * layer.page_tokens + tokens)[:, None]
    parts = ()
    if store.is_raw:
        raw = (record + store.codes).to(tl.pointer_type(MODEL)) + row_number * D
        for part in tl.static_range(PARTS):
            parts = parts + (tl.load(raw + (part * C + channels)[None, :]).to(DTYPE),)
    else:
        row = record + store.codes + row_number * (D * store.bits // 8)
        LENGTH: tl.constexpr = D // store.planes
        COLUMNS: tl.constexpr = LENGTH // C
        low = ()
        for column in tl.static_range(COLUMNS):
            low = low + (load_codes(row, column * C, C),)
        for part in tl.static_range(PARTS):
            x = plane_numbers(
                low[part % COLUMNS], codebooks, row, part % COLUMNS * C, part // COLUMNS, C, store, D, layer, DTYPE
            )
            x = dequantized(x, record, head, t, T, part * C, C, store, layer, tiling, True, DTYPE)
            for kept in tl.static_range(KEPT):
                place = tl.load(record + layer.row_places + kept).to(tl.int32)
                values = (record + layer.k_rows).to(tl.pointer_type(MODEL)) + (head * layer.num_rows + kept) * D
                kept_row = tl.load(values + part * C + channels).to(DTYPE)
                x = tl.where((tokens == place)[:, None], kept_row[None, :], x)
            parts = parts + (x,)
    return parts


@triton.jit
def key_multiplier(record, head, t: tl.constexpr, T: tl.constexpr, layer: tl.constexpr):
    """fp32 [T]: what the logits of tokens are multiplied by."""
    store: tl.constexpr = layer.k
    KEPT: tl.constexpr = layer.num_rows
    tokens = t + tl.arange(0, T)
    if layer.has_norm:
        multiplier = tl.load((record + layer.k_norm).to(tl.pointer_type(tl.float16)) + tokens).to(tl.float32)
    else:
        multiplier = tl.full((T,), 1.0, tl.float32)
    if store.is_byte and layer.num_rows == 0:
        multiplier = multiplier * head_factor(record, head, store)
    for kept in tl.static_range(KEPT):
        place = tl.load(record + layer.row_places + kept).to(tl.int32)
        multiplier = tl.where(tokens == place, 1.0, multiplier)
    return multiplier


@triton.jit
def load_values(
    record,
    head,
    codebooks,
    c: tl.constexpr,
    C: tl.constexpr,
    column: tl.constexpr,
    T: tl.constexpr,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    DTYPE: tl.constexpr,
    MODEL: tl.constexpr,
):
    """V at C channels from `c` on and T tokens from `column` on of each plane, as tiles [C, T]: a tuple of planes.
    Without the factor."""
    store: tl.constexpr = layer.v
    D: tl.constexpr = layer.head_dim
    P: tl.constexpr = layer.page_tokens
    PLANES: tl.constexpr = store.planes
    KEPT: tl.constexpr = layer.num_rows
    channels = c + tl.arange(0, C)
    tiles = ()
    if store.is_raw:
        tokens = column + tl.arange(0, T)
        raw = (record + store.codes).to(tl.pointer_type(MODEL))
        x = tl.load(raw + (head * P + tokens)[:, None] * D + channels[None, :]).to(DTYPE)
        tiles = tiles + (tl.trans(x),)
    else:
        row = record + store.codes + (head * D + channels)[:, None] * (P * store.bits // 8)
        low = load_codes(row, column, T)
        for part in tl.static_range(PLANES):
            t = part * (P // PLANES) + column
            x = plane_numbers(low, codebooks, row, column, part, T, store, P, layer, DTYPE)
            x = dequantized(x, record, head, t, T, c, C, store, layer, tiling, False, DTYPE)
            for kept in tl.static_range(KEPT):
                place = tl.load(record + layer.row_places + kept).to(tl.int32)
                values = (record + layer.v_rows).to(tl.pointer_type(MODEL)) + (head * layer.num_rows + kept) * D
                kept_row = tl.load(values + channels).to(DTYPE)
                x = tl.where((t + tl.arange(0, T) == place)[None, :], kept_row[:, None], x)
            tiles = tiles + (x,)
    return tiles
