"""One page of keys under a tile of queries: an online softmax (Milakov & Gimelshein, arXiv 1805.02867) in base 2.

A tile has M queries of one KV head. Its state is `acc`, a tuple of fp32 [M, C] tiles over the channels of V, `largest`
[M], the largest logit so far, and `total` [M], the sum of weights relative to it. Every query sees a key in the first
page that it meets. Tiles with queries are transposed where `Tiling.query_axis` is 1.
"""

import triton
import triton.language as tl

from kernels.triton.parameters import head_factor
from kernels.triton.tiles import key_multiplier, load_keys, load_values


@triton.jit
def of_queries(x, tiling: tl.constexpr):
    """One number a query, for all keys or channels."""
    return tl.expand_dims(x, 1 - tiling.query_axis)


@triton.jit
def of_others(x, tiling: tl.constexpr):
    """One number a key or channel, for all queries."""
    return tl.expand_dims(x, tiling.query_axis)


@triton.jit
def load_queries(q, is_row, layer: tl.constexpr, tiling: tl.constexpr, M: tl.constexpr, scale, DTYPE: tl.constexpr):
    """The queries that fp32 pointers `q` [M] begin at, times `scale`, as `key_parts` tiles; 0 where not `is_row`."""
    PARTS: tl.constexpr = tiling.key_parts
    C: tl.constexpr = layer.head_dim // PARTS
    parts = ()
    for part in tl.static_range(PARTS):
        where = of_queries(q, tiling) + of_others(part * C + tl.arange(0, C), tiling)
        x = tl.load(where, mask=of_queries(is_row, tiling), other=0.0)
        parts = parts + ((x * scale).to(DTYPE),)
    return parts


@triton.jit
def zeros(M: tl.constexpr, N: tl.constexpr, tiling: tl.constexpr):
    """fp32, of M queries."""
    return tl.zeros((M, N) if tiling.query_axis == 0 else (N, M), tl.float32)


@triton.jit
def start(layer: tl.constexpr, tiling: tl.constexpr, M: tl.constexpr):
    """The state before the first page."""
    C: tl.constexpr = tiling.channels
    BLOCKS: tl.constexpr = layer.head_dim // C
    acc = ()
    for _ in tl.static_range(BLOCKS):
        acc = acc + (zeros(M, C, tiling),)
    return acc, tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)


@triton.jit
def hadamard_tile(C: tl.constexpr, DTYPE: tl.constexpr):
    """Sylvester's matrix [C, C] of 1 and -1: the sign is the parity of the bits that row and column share."""
    odd = tl.arange(0, C)[:, None] & tl.arange(0, C)[None, :]
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return (1 - 2 * odd).to(DTYPE)


@triton.jit
def turned(parts, cos, sin, t, T: tl.constexpr, layer: tl.constexpr, tiling: tl.constexpr, DTYPE: tl.constexpr):
    """K that is stored before RoPE, after it; `cos` and `sin` fp32 point to the page's first token. Where K is rotated
    as well, that is undone first: inside a part by a product, between parts by sums and differences."""
    PARTS: tl.constexpr = tiling.key_parts
    tl.static_assert(PARTS <= 4)  # the parity of two bits is taken below
    C: tl.constexpr = layer.head_dim // PARTS
    if layer.is_rotated_before_rope:
        matrix = hadamard_tile(C, DTYPE)
        mixed = ()
        for part in tl.static_range(PARTS):
            mixed = mixed + (tl.dot(parts[part], matrix, input_precision="ieee"),)
        unrotated = ()
        for part in tl.static_range(PARTS):
            x = mixed[0]
            for other in tl.static_range(1, PARTS):
                x = x - mixed[other] if ((part & other) ^ ((part & other) >> 1)) & 1 == 1 else x + mixed[other]
            unrotated = unrotated + (x * layer.head_dim**-0.5,)
    else:
        unrotated = parts
    HALF: tl.constexpr = PARTS // 2
    place = (t + tl.arange(0, T))[:, None] * (layer.head_dim // 2) + tl.arange(0, C)[None, :]
    left = ()
    right = ()
    for part in tl.static_range(HALF):
        first = unrotated[part].to(tl.float32)
        second = unrotated[part + HALF].to(tl.float32)
        c = tl.load(cos + place + part * C)
        s = tl.load(sin + place + part * C)
        left = left + ((first * c - second * s).to(DTYPE),)
        right = right + ((second * c + first * s).to(DTYPE),)
    return left + right


@triton.jit
def store_stats(to, largest, second, is_row, M: tl.constexpr):
    """Two numbers a query, [2, M] from `to` [M] on: the largest logit, and a sum of weights relative to it."""
    tl.store(to, largest, mask=is_row)
    tl.store(to + M, second, mask=is_row)


@triton.jit
def key_logits(q, keys, tiling: tl.constexpr):
    """q . K of parts of queries and keys [T, C]: fp32, of M queries and T keys."""
    PARTS: tl.constexpr = tiling.key_parts
    if tiling.query_axis == 0:
        logits = tl.dot(q[0], tl.trans(keys[0]), input_precision="ieee")
        for part in tl.static_range(1, PARTS):
            logits = tl.dot(q[part], tl.trans(keys[part]), logits, input_precision="ieee")
    else:
        logits = tl.dot(keys[0], q[0], input_precision="ieee")
        for part in tl.static_range(1, PARTS):
            logits = tl.dot(keys[part], q[part], logits, input_precision="ieee")
    return logits


@triton.jit
def largest_of(tiles, TILES: tl.constexpr, tiling: tl.constexpr):
    """Of each query [M], over the keys of all tiles. Where keys lie across warps, these meet once; else tile by tile,
    which takes fewer registers."""
    if tiling.query_axis == 0:
        result = tl.max(tiles[0], 1)
        for tile in tl.static_range(1, TILES):
            result = tl.maximum(result, tl.max(tiles[tile], 1))
    else:
        all_tiles = tiles[0]
        for tile in tl.static_range(1, TILES):
            all_tiles = tl.maximum(all_tiles, tiles[tile])
        result = tl.max(all_tiles, 0)
    return result


@triton.jit
def sum_of(tiles, TILES: tl.constexpr, tiling: tl.constexpr):
    """As `largest_of`."""
    if tiling.query_axis == 0:
        result = tl.sum(tiles[0], 1)
        for tile in tl.static_range(1, TILES):
            result += tl.sum(tiles[tile], 1)
    else:
        all_tiles = tiles[0]
        for tile in tl.static_range(1, TILES):
            all_tiles += tiles[tile]
        result = tl.sum(all_tiles, 0)
    return result


@triton.jit
def add_values(acc, weight, values, tiling: tl.constexpr):
    """`acc` and the products of weights with values [C, T]."""
    if tiling.query_axis == 0:
        acc = tl.dot(weight, tl.trans(values), acc, input_precision="ieee")
    else:
        acc = tl.dot(values, weight, acc, input_precision="ieee")
    return acc


@triton.jit
def attend_sealed(
    q,
    acc,
    largest,
    total,
    record,
    head,
    codebooks,
    cos,
    sin,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    DTYPE: tl.constexpr,
    MODEL: tl.constexpr,
    M: tl.constexpr,
):
    """A sealed page. Returns the new state and what the page added to `total` [M]."""
    P: tl.constexpr = layer.page_tokens
    T: tl.constexpr = tiling.tokens
    C: tl.constexpr = tiling.channels
    TILES: tl.constexpr = P // T
    logits = ()
    for tile in tl.static_range(TILES):
        keys = load_keys(record, head, codebooks, tile * T, T, layer, tiling, DTYPE, MODEL)
        if layer.before_rope:
            keys = turned(keys, cos, sin, tile * T, T, layer, tiling, DTYPE)
        part = key_logits(q, keys, tiling)
        if layer.has_norm or layer.k.is_byte:
            part = part * of_others(key_multiplier(record, head, tile * T, T, layer), tiling)
        logits = logits + (part,)
    new = tl.maximum(largest, largest_of(logits, TILES, tiling))
    shrink = tl.exp2(largest - new)
    weights = ()
    for tile in tl.static_range(TILES):
        weights = weights + (tl.exp2(logits[tile] - of_queries(new, tiling)),)
    added = sum_of(weights, TILES, tiling)
    store: tl.constexpr = layer.v
    PLANES: tl.constexpr = store.planes
    COLUMNS: tl.constexpr = TILES // PLANES
    BLOCKS: tl.constexpr = layer.head_dim // C
    mixed = ()
    for block in tl.static_range(BLOCKS):
        old = acc[block] * of_queries(shrink, tiling)
        page = zeros(M, C, tiling) if store.is_byte and layer.num_rows == 0 else old
        for column in tl.static_range(COLUMNS):
            values = load_values(record, head, codebooks, block * C, C, column * T, T, layer, tiling, DTYPE, MODEL)
            for part in tl.static_range(PLANES):
                page = add_values(page, weights[part * COLUMNS + column].to(DTYPE), values[part], tiling)
        if store.is_byte and layer.num_rows == 0:
            page = old + page * head_factor(record, head, store)
        mixed = mixed + (page,)
    return mixed, new, total * shrink + added, added


@triton.jit
def attend_16bit(
    q,
    acc,
    largest,
    total,
    k,
    v,
    k_stride,
    v_stride,
    num_tokens,
    last_seen,
    cos,
    sin,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    DTYPE: tl.constexpr,
    M: tl.constexpr,
):
    """A page in the model's dtype: `k`, `v` point to its first token, the next one is a stride on. It has `num_tokens`,
    what lies behind them is not read; a query sees those up to `last_seen` [M]."""
    T: tl.constexpr = tiling.tokens_16bit
    PARTS: tl.constexpr = tiling.key_parts
    CK: tl.constexpr = layer.head_dim // PARTS
    C: tl.constexpr = tiling.channels
    BLOCKS: tl.constexpr = layer.head_dim // C
    KEYS: tl.constexpr = 1 - tiling.query_axis
    added = tl.zeros((M,), tl.float32)
    for t in range(0, num_tokens, T):
        tokens = t + tl.arange(0, T)
        exists = (tokens < num_tokens)[:, None]
        keys = ()
        for part in tl.static_range(PARTS):
            channels = part * CK + tl.arange(0, CK)
            x = tl.load(k + tokens[:, None] * k_stride + channels[None, :], mask=exists, other=0.0)
            keys = keys + (x.to(DTYPE),)
        if layer.before_rope:
            keys = turned(keys, cos, sin, t, T, layer, tiling, DTYPE)
        is_seen = of_others(tokens, tiling) <= of_queries(last_seen, tiling)
        logits = tl.where(is_seen, key_logits(q, keys, tiling), float("-inf"))
        new = tl.maximum(largest, tl.max(logits, KEYS))
        shrink = tl.exp2(largest - new)
        weight = tl.exp2(logits - of_queries(new, tiling))
        sums = tl.sum(weight, KEYS)
        added = added * shrink + sums
        total = total * shrink + sums
        weight = weight.to(DTYPE)
        mixed = ()
        for block in tl.static_range(BLOCKS):
            channels = block * C + tl.arange(0, C)
            values = tl.load(v + tokens[:, None] * v_stride + channels[None, :], mask=exists, other=0.0).to(DTYPE)
            mixed = mixed + (add_values(acc[block] * of_queries(shrink, tiling), weight, tl.trans(values), tiling),)
        acc = mixed
        largest = new
    return acc, largest, total, added
