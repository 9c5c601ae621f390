"""The page format and the sealed-page rule written out slowly: what every backend is tested against.

It reads and writes bytes by its own arithmetic and shares no code with the backends. Encoding is in IEEE single
precision, step by step, because a record is defined to the last bit; decoding and attention are in float64.

    Integer   zero = half(min), scale = half((max - min) / max_code), code = nearest_even((x - zero) / scale)
    Float8    scale = half(max |x| / max_code), code = the float8 number nearest to x / scale, ties to the even code
    K         parameters per channel, over the tokens of the page; where normed, of x / norm(token)
    V         parameters per token, over the channels of the head

Every division and subtraction takes the parameters as stored. Scales and norms are kept within the normal numbers of
fp16, and codes within their range, so that neither a constant nor a huge range makes NaN.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.format.layout import Field, PageLayout, PageRef, Pool
from kernels.format.recipe import Codec, Float8, Integer, Raw

Array = NDArray[Any]

SMALLEST, LARGEST = np.float32(2.0**-14), np.float32(65504.0)  # normal numbers of fp16


def span(field: Field) -> slice:
    return slice(field.offset, field.offset + field.num_bytes)


def plane_places(length: int, bits: int) -> tuple[Array, Array]:
    """(byte, lowest bit) of each of `length` codes in a packed row: byte `j` holds `j, j + L/n, …`, lowest first."""
    element = np.arange(length)
    row_bytes = length * bits // 8
    return element % row_bytes, (element // row_bytes * bits).astype(np.uint8)


def pack_row(codes: Array, bits: int) -> Array:
    """uint8 [..., L] to uint8 [..., L * bits / 8]."""
    length = codes.shape[-1]
    packed = np.zeros((*codes.shape[:-1], length * bits // 8), np.uint8)
    for element, (byte, shift) in enumerate(zip(*plane_places(length, bits), strict=True)):
        packed[..., byte] |= codes[..., element] << shift
    return packed


def unpack_row(packed: Array, bits: int) -> Array:
    """uint8 [..., B] to uint8 [..., B * 8 / bits]."""
    byte, shift = plane_places(packed.shape[-1] * 8 // bits, bits)
    return np.asarray(packed[..., byte] >> shift) & ((1 << bits) - 1)


def float8_values(codec: Float8) -> Array:
    """The float64 numbers of the 256 codes: sign, exponent, mantissa. No code of a record is an infinity or NaN, so
    those of the format get the finite value that they would have without that rule."""
    code = np.arange(256)
    mantissa = code % 2**codec.mantissa_bits / 2**codec.mantissa_bits
    exponent = code % 128 // 2**codec.mantissa_bits
    bias = 2 ** (codec.exponent_bits - 1) - 1
    magnitude: Array = np.where(exponent == 0, 2 * mantissa, 1 + mantissa) * 2.0 ** (exponent - bias)
    return np.where(code < 128, magnitude, -magnitude)


def nearest_even(x: Array) -> Array:
    """Integers nearest to `x`; halves to the even one."""
    below, rest = np.floor(x), x - np.floor(x)
    return np.where((rest > 0.5) | ((rest == 0.5) & (below % 2 == 1)), below + 1, below)


def nearest_float8(x: Array, codec: Float8) -> Array:
    """uint8 codes of the numbers nearest to `x` (|x| <= max_code); ties to the even code, signed zeros kept."""
    values = float8_values(codec)[:128]
    magnitude = np.abs(x.astype(np.float64))
    above = np.minimum(np.searchsorted(values, magnitude), 127)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - magnitude, magnitude - values[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.signbit(x), code + 128, code).astype(np.uint8)


def stored_scale(x: Array) -> Array:
    """To fp16, away from zero and infinity."""
    return np.clip(x, SMALLEST, LARGEST).astype(np.float16)


def encode(x: Array, codec: Integer | Float8, axis: int) -> tuple[Array, Array, Array | None]:
    """fp32 [kv_heads, P, D] to uint8 codes of that shape, and fp16 scale and zero without `axis`."""
    with np.errstate(over="ignore"):  # a range beyond fp32 is infinite, and its scale the largest there is
        if isinstance(codec, Float8):
            scale = stored_scale(np.abs(x).max(axis) / np.float32(codec.max_code))
            scaled = x / np.expand_dims(scale, axis).astype(np.float32)
            return nearest_float8(np.clip(scaled, -codec.max_code, codec.max_code), codec), scale, None
        low, high = x.min(axis), x.max(axis)
        zero = np.clip(low, -LARGEST, LARGEST).astype(np.float16)
        scale = stored_scale((high - low) / np.float32(codec.max_code))
        steps = (x - np.expand_dims(zero, axis).astype(np.float32)) / np.expand_dims(scale, axis).astype(np.float32)
        return nearest_even(np.clip(steps, 0, codec.max_code)).astype(np.uint8), scale, zero


def token_norms(k: Array) -> Array:
    """fp16 [P]: the norm of each token of fp32 `k` [kv_heads, P, D] over all heads.

    The order of this sum is the backend's, so a backend's norm may be the fp16 number next to this one.
    """
    total = np.square(k.astype(np.float64)).sum((0, 2))
    with np.errstate(over="ignore"):
        return stored_scale(np.sqrt(total.astype(np.float32)))


def raw_bytes(x: Array, dtype: str) -> Array:
    """fp32 `x`, already rounded to `dtype`, as bytes."""
    if dtype == "bfloat16":  # the upper half of fp32
        return np.ascontiguousarray(x, np.float32).view(np.uint16).reshape(-1, 2)[:, 1].copy().view(np.uint8)
    return np.ascontiguousarray(x, dtype).view(np.uint8).ravel()


def raw_values(data: Array, dtype: str) -> Array:
    """The inverse of `raw_bytes`, float64 [n]."""
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(dtype).astype(np.float64)


def encode_page(layout: PageLayout, k: Array, v: Array, norms: Array | None = None) -> Array:
    """The record of a full page, uint8 [page_bytes]. `k`, `v`: fp32 [layers, kv_heads, P, D], already rounded to the
    model's dtype. `norms`: fp16 [layers, P], where another choice than `token_norms` is to be encoded."""
    record = np.zeros(layout.page_bytes, np.uint8)

    def put(field: Field | None, data: Array | None) -> None:
        if field is not None and data is not None:
            record[span(field)] = np.ascontiguousarray(data).view(np.uint8).ravel()

    def store(
        x: Array, codec: Codec, axis: int, codes_at: Field, scale_at: Field | None, zero_at: Field | None
    ) -> None:
        if isinstance(codec, Raw):
            return put(codes_at, raw_bytes(x, layout.dtype))
        codes, scale, zero = encode(x, codec, axis)
        rows = codes if axis == 1 else codes.swapaxes(1, 2)  # a row lies along what attention contracts
        put(codes_at, pack_row(rows, codec.bits) if isinstance(codec, Integer) else rows)
        put(scale_at, scale)
        put(zero_at, zero)

    for layer, (recipe, fields) in enumerate(zip(layout.recipe.layers, layout.layers, strict=True)):
        keys = k[layer]
        if recipe.norm_k:
            norm = token_norms(keys) if norms is None else norms[layer]
            put(fields.k_norm, norm)
            keys = keys / norm.astype(np.float32)[:, None]
        store(keys, recipe.k, 1, fields.k_codes, fields.k_scale, fields.k_zero)
        store(v[layer], recipe.v, 2, fields.v_codes, fields.v_scale, fields.v_zero)
    return record


class PageReader:
    """K and V of pages, and attention over them.

    `sealed`: uint8 [pages, page_bytes]. `open_pool`: float64 [slots, layers, 2, kv_heads, P, D].
    """

    def __init__(self, layout: PageLayout, sealed: Array, open_pool: Array):
        self._layout = layout
        self._sealed = sealed
        self._open = open_pool

    def read(self, layer: int, ref: PageRef) -> tuple[Array, Array]:
        """float64 K and V [kv_heads, P, D] of a page."""
        if ref.pool is Pool.OPEN:
            return self._open[ref.id, layer, 0], self._open[ref.id, layer, 1]
        record, recipe, fields = self._sealed[ref.id], self._layout.recipe.layers[layer], self._layout.layers[layer]

        def parameter(field: Field) -> Array:
            return np.asarray(record[span(field)].view(np.float16), np.float64).reshape(field.shape)

        def load(codec: Codec, axis: int, codes: Field, scale: Field | None, zero: Field | None) -> Array:
            if scale is None or isinstance(codec, Raw):
                return raw_values(record[span(codes)], self._layout.dtype).reshape(codes.shape)
            rows = record[span(codes)].reshape(codes.shape)
            values = unpack_row(rows, codec.bits) if isinstance(codec, Integer) else float8_values(codec)[rows]
            x: Array = (values if axis == 1 else values.swapaxes(1, 2)) * np.expand_dims(parameter(scale), axis)
            x += 0.0 if zero is None else np.expand_dims(parameter(zero), axis)
            return x

        k = load(recipe.k, 1, fields.k_codes, fields.k_scale, fields.k_zero)
        if fields.k_norm is not None:
            k = k * parameter(fields.k_norm)[:, None]
        return k, load(recipe.v, 2, fields.v_codes, fields.v_scale, fields.v_zero)

    def attend(
        self, layer: int, q: Array, before: Sequence[PageRef], own_k: Array, own_v: Array
    ) -> tuple[Array, Array]:
        """Attention of one query `q` [heads, D]: over the pages `before` its own as they are stored, and over its own
        page up to itself in 16 bit, `own_k` and `own_v` [tokens, kv_heads, D]. Returns float64 [heads, D], and the
        softmax weight of each of these pages, float64 [heads, pages]."""
        tiles = [self.read(layer, ref) for ref in before] + [(own_k.swapaxes(0, 1), own_v.swapaxes(0, 1))]
        k, v = (np.concatenate(parts, axis=1) for parts in zip(*tiles, strict=True))  # [kv_heads, tokens, D]
        grouped = q.astype(np.float64).reshape(len(k), -1, q.shape[-1])  # consecutive heads share a kv head
        logits = grouped @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        ends = np.cumsum([tile.shape[1] for tile, _ in tiles])
        mass = [page.sum(-1) for page in np.split(weights, ends[:-1], axis=-1)]
        return (weights @ v).reshape(q.shape), np.stack(mass, -1).reshape(len(q), -1)
