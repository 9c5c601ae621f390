"""The page format and the sealed-page rule written out slowly: what every backend is tested against.

It reads and writes bytes by its own arithmetic and shares no code with the backends. Encoding is in IEEE single
precision, step by step, because a record is defined to the last bit; decoding and attention are in float64.

    K         parameters of blocks, mostly per channel over tokens; where normed, of x / norm(token)
    V         parameters of blocks, mostly per token over the channels of the head
    Integer   zero = min, scale = (max - min) / max_code, code = nearest_even((x - zero) / scale)
    Float8    scale = max |x| / max_code, code = the float8 number nearest to x / scale, ties to the even code
              (the other codecs: docs/kv_layout.md)

Every division and subtraction takes the parameters as stored. Scales and norms are kept within the normal numbers of
fp16, and codes within their range, so that neither a constant nor a huge range makes NaN.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kernels.format.codec import (
    Centred,
    Codec,
    Float8,
    Integer,
    Parameters,
    Quantizer,
    Raw,
    Store,
    Symmetric,
    Table,
)
from kernels.format.hadamard import hadamard
from kernels.format.layout import NO_ROW, Field, PageLayout, PageRef, Pool, StoreFields
from kernels.format.recipe import LargestValues, MarkedTokens
from kernels.reference_numbers import (
    BYTE_SCALES,
    LARGEST,
    SMALLEST,
    Array,
    byte_scale,
    float8_values,
    nearest_even,
    nearest_float8,
    pack_row,
    raw_bytes,
    raw_values,
    stored_scale,
    unpack_row,
)


def span(field: Field) -> slice:
    return slice(field.offset, field.offset + field.num_bytes)


class Encoded(NamedTuple):
    """Codes in the tile's shape, parameters as they are stored, None where nothing is stored."""

    codes: Array
    scale: Array | None
    zero: Array | None
    factor: Array | None


def each(parameter: Array, shape: tuple[int, ...]) -> Array:
    """A number a block to a number an element: [H, P/g, D/c] to [H, P, D]."""
    _, tokens, channels = shape
    return parameter.repeat(tokens // parameter.shape[1], 1).repeat(channels // parameter.shape[2], 2)


def block_ranges(x: Array, excluded: Array, group_tokens: int, group_channels: int) -> tuple[Array, Array]:
    """Smallest and largest of the elements of each block that are not excluded; 0 where all are."""
    heads, tokens, channels = x.shape
    low, high = np.zeros((2, heads, tokens // group_tokens, channels // group_channels), np.float32)
    for head, row, column in np.ndindex(*low.shape):
        block = np.s_[head, row * group_tokens :, column * group_channels :]
        inside = x[block][:group_tokens, :group_channels][~excluded[block][:group_tokens, :group_channels]]
        if inside.size:
            low[head, row, column], high[head, row, column] = inside.min(), inside.max()
    return low, high


def wanted_parameters(codec: Quantizer, low: Array, high: Array) -> tuple[Array, Array | None]:
    """Scale and zero before they are rounded; None: no zero is stored."""
    half = np.float32(0.5)
    largest = np.maximum(np.abs(low), np.abs(high))
    if isinstance(codec, Integer):
        return (high - low) / np.float32(2**codec.bits - 1), low
    if isinstance(codec, Table):
        return (largest, None) if codec.is_centred else ((high - low) * half, (low + high) * half)
    if isinstance(codec, Centred):
        return largest / np.float32((2**codec.bits - 1) / 2), None
    if isinstance(codec, Symmetric):
        if codec.bits == 8:
            return largest / np.float32(127), None
        ends: Array = np.where(np.abs(low) >= np.abs(high), low, high)
        return ends / np.float32(-(2 ** (codec.bits - 1))), None
    assert isinstance(codec, Float8)
    return largest / np.float32(codec.max_code), None


def stored_zero_of(codec: Codec, scale: Array) -> Array | None:
    """Zeros that follow from the scale."""
    if isinstance(codec, Centred):
        return scale * np.float32(-(2**codec.bits - 1) / 2)
    return scale * np.float32(-(2 ** (codec.bits - 1))) if isinstance(codec, Symmetric) else None


def zero_in_scales(codec: Codec) -> float:
    """What an 8-bit zero counts: a 32nd of the range, which is 2^b - 1 scales, or 2 of a table."""
    return 2 / 32 if isinstance(codec, Table) else codec.max_code / 32 if isinstance(codec, Integer) else 0.0


def encode(x: Array, store: Store, groups: tuple[int, int], excluded: Array | None = None) -> Encoded:
    """fp32 [kv_heads, P, D] to uint8 codes of that shape and the parameters of blocks of `groups` tokens x channels."""
    codec = store.codec
    assert not isinstance(codec, Raw)
    with np.errstate(over="ignore"):  # a range beyond fp32 is infinite, and its scale the largest there is
        mask = np.zeros(x.shape, bool) if excluded is None else excluded
        low, high = block_ranges(x, mask, *groups)
        scale, zero = wanted_parameters(codec, low, high)
        if store.clip < 1:
            scale = scale * np.float32(store.clip)
            zero = low + (high - low) * np.float32((1 - store.clip) / 2) if isinstance(codec, Integer) else zero
        if store.parameters is Parameters.UNIT:
            return Encoded(nearest_code(x, codec), None, None, None)
        if store.parameters is Parameters.HALF:
            kept = np.where(scale < 0, -1, 1).astype(np.float16) * stored_scale(np.abs(scale))
            kept_zero = None if zero is None else np.clip(zero, -LARGEST, LARGEST).astype(np.float16) + np.float16(0)
            used, used_zero, factor = kept.astype(np.float32), kept_zero, None
        else:
            unit = np.float32(zero_in_scales(codec))
            if zero is not None:
                scale = np.maximum(scale, np.abs(zero) / (np.float32(120) * unit))
            factor = stored_scale(scale.max((1, 2)) / np.float32(1.9375))
            kept = byte_scale(scale / factor.astype(np.float32)[:, None, None])
            used = BYTE_SCALES[kept].astype(np.float32) * factor.astype(np.float32)[:, None, None]
            kept_zero = None if zero is None else nearest_even(np.clip(zero / (used * unit), -128, 127)).astype(np.int8)
            used_zero = None if kept_zero is None else kept_zero.astype(np.float32) * (used * unit)
        if kept_zero is None:
            used_zero = stored_zero_of(codec, used)
        steps = x if used_zero is None else x - each(used_zero.astype(np.float32), x.shape)
        return Encoded(nearest_code(steps / each(used, x.shape), codec), kept, kept_zero, factor)


def nearest_code(x: Array, codec: Quantizer) -> Array:
    """uint8 codes of numbers relative to zero, in units of the scale."""
    codes: Array
    if isinstance(codec, Float8):
        return nearest_float8(np.clip(x, -codec.max_code, codec.max_code), codec)
    if isinstance(codec, Table):
        codes = (x[..., None] > np.array(codec.bounds, np.float32)).sum(-1)
        return codes.astype(np.uint8)
    return nearest_even(np.clip(x, 0, codec.max_code)).astype(np.uint8)


def outlier_places(x: Array, groups: tuple[int, int], num: int) -> Array:
    """int16 [P, num]: for each token of fp32 `x` the places in [0, H·D) of the elements farthest from the middle of
    their block, in units of the distance between the block's tenths."""
    heads, tokens, channels = x.shape
    far = np.zeros_like(x)
    for head, row, column in np.ndindex(heads, tokens // groups[0], channels // groups[1]):
        block = np.s_[head, row * groups[0] : (row + 1) * groups[0], column * groups[1] : (column + 1) * groups[1]]
        ranked = np.sort(x[block].ravel())
        low, high = ranked[ranked.size // 10], ranked[ranked.size - 1 - ranked.size // 10]
        with np.errstate(over="ignore"):
            far[block] = np.abs(x[block] - (low + high) / np.float32(2)) / np.maximum(high - low, SMALLEST)
    return np.argsort(-far.swapaxes(0, 1).reshape(tokens, -1), axis=1, kind="stable")[:, :num].astype(np.int16)


def row_places(rule: LargestValues | MarkedTokens, v: Array, marks: Sequence[int]) -> Array:
    """uint8 [num]: the tokens of a page whose rows are kept. v: fp32 [H, P, D]; `marks`: places of marked tokens."""
    if isinstance(rule, LargestValues):
        norms = np.square(v.astype(np.float64)).sum((0, 2))
        return np.argsort(-norms, kind="stable")[: rule.num].astype(np.uint8)
    kept = sorted(marks)[: rule.num]
    return np.array(kept + [NO_ROW] * (rule.num - len(kept)), np.uint8)


def token_norms(k: Array) -> Array:
    """fp16 [P]: the norm of each token of fp32 `k` [kv_heads, P, D] over all heads.

    The order of this sum is the backend's, so a backend's norm may be the fp16 number next to this one.
    """
    total = np.square(k.astype(np.float64)).sum((0, 2))
    with np.errstate(over="ignore"):
        return stored_scale(np.sqrt(total.astype(np.float32)))


def encode_page(layout: PageLayout, k: Array, v: Array, norms: Array | None = None, marks: Sequence[int] = ()) -> Array:
    """The record of a full page, uint8 [page_bytes]. `k`, `v`: fp32 [layers, kv_heads, P, D], already rounded to the
    model's dtype. `norms`: fp16 [layers, P], where another choice than `token_norms` is to be encoded. `marks`: places
    of tokens that the sink rule marks."""
    record = np.zeros(layout.page_bytes, np.uint8)

    def put(field: Field | None, data: Array | None) -> None:
        if field is not None and data is not None:
            record[span(field)] = np.ascontiguousarray(data).view(np.uint8).ravel()

    def store(x: Array, fields: StoreFields, excluded: Array, is_key: bool) -> None:
        codec = fields.store.codec
        if isinstance(codec, Raw):
            return put(fields.codes, raw_bytes(x, layout.dtype))
        groups = fields.group_tokens, fields.group_channels
        if fields.outlier_places is not None:
            places = outlier_places(x, groups, fields.store.num_outliers)
            flat, mask = x.swapaxes(0, 1).reshape(x.shape[1], -1), excluded.swapaxes(0, 1).reshape(x.shape[1], -1)
            values = np.take_along_axis(flat, places.astype(int), 1)
            put(fields.outlier_places, places)
            put(fields.outlier_values, np.clip(values, -LARGEST, LARGEST).astype(np.float16))
            mask = mask.copy()
            np.put_along_axis(mask, places.astype(int), True, 1)
            excluded = mask.reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1)
        encoded = encode(x, fields.store, groups, excluded)
        rows = encoded.codes if is_key else encoded.codes.swapaxes(1, 2)  # a row lies along what attention contracts
        put(fields.codes, rows if codec.bits == 8 else pack_row(rows, codec.bits))
        put(fields.scale, encoded.scale)
        put(fields.zero, encoded.zero)
        put(fields.factor, encoded.factor)

    for layer, (recipe, fields) in enumerate(zip(layout.recipe.layers, layout.layers, strict=True)):
        keys = k[layer]
        if recipe.norm_k:
            norm = token_norms(keys) if norms is None else norms[layer]
            put(fields.k_norm, norm)
            keys = keys / norm.astype(np.float32)[:, None]
        excluded = np.zeros(keys.shape, bool)
        if recipe.outliers is not None:
            places = row_places(recipe.outliers, v[layer], marks)
            kept = places[places != NO_ROW]
            rows = np.zeros((2, len(keys), recipe.outliers.num, keys.shape[2]), np.float32)
            rows[:, :, : len(kept)] = k[layer][:, kept], v[layer][:, kept]
            excluded[:, kept] = True
            put(fields.row_places, places)
            put(fields.k_rows, raw_bytes(rows[0], layout.dtype))
            put(fields.v_rows, raw_bytes(rows[1], layout.dtype))
        store(keys, fields.k, excluded, True)
        store(v[layer], fields.v, excluded, False)
    return record


class PageReader:
    """K and V of pages, and attention over them.

    `sealed`: uint8 [pages, page_bytes]. `open_pool`: float64 [slots, layers, 2, kv_heads, P, D]. `turn`: where K is
    stored before RoPE, what applies it to float64 K [kv_heads, tokens, D] at positions [tokens].
    """

    def __init__(
        self,
        layout: PageLayout,
        sealed: Array,
        open_pool: Array,
        turn: Callable[[Array, Array], Array] | None = None,
    ):
        self._layout = layout
        self._sealed = sealed
        self._open = open_pool
        self._turn = turn

    def read(self, layer: int, ref: PageRef) -> tuple[Array, Array]:
        """float64 K and V [kv_heads, P, D] of a page, as stored: K before RoPE where the recipe says so."""
        if ref.pool is Pool.OPEN:
            return self._open[ref.id, layer, 0], self._open[ref.id, layer, 1]
        record, fields = self._sealed[ref.id], self._layout.layers[layer]

        def data(field: Field, dtype: str | None = None) -> Array:
            values = raw_values(record[span(field)], field.dtype) if dtype is None else record[span(field)].view(dtype)
            return np.asarray(values).reshape(field.shape)

        def load(side: StoreFields, is_key: bool) -> Array:
            codec = side.store.codec
            if isinstance(codec, Raw):
                return data(side.codes)
            rows = data(side.codes, "uint8")
            codes = rows if codec.bits == 8 else unpack_row(rows, codec.bits)
            x: Array
            if isinstance(codec, Float8):
                x = float8_values(codec)[codes]
            elif isinstance(codec, Table):
                x = np.array(codec.values)[codes]
            else:
                x = codes.astype(np.float64)
            x = x if is_key else x.swapaxes(1, 2)
            if side.scale is not None:
                if side.factor is None:
                    scale = data(side.scale)
                else:
                    scale = BYTE_SCALES[data(side.scale, "uint8")] * data(side.factor)[:, None, None]
                zero = stored_zero_of(codec, scale)
                if side.zero is not None:
                    zero = data(side.zero)
                    if side.factor is not None:
                        zero = data(side.zero, "int8") * scale * zero_in_scales(codec)
                x = x * each(scale, x.shape) + (0.0 if zero is None else each(zero, x.shape))
            if side.outlier_places is not None and side.outlier_values is not None:
                flat = np.ascontiguousarray(x.swapaxes(0, 1)).reshape(x.shape[1], -1)
                np.put_along_axis(flat, data(side.outlier_places, "int16").astype(int), data(side.outlier_values), 1)
                x = flat.reshape(x.shape[1], x.shape[0], -1).swapaxes(0, 1)
            return x

        k, v = load(fields.k, True), load(fields.v, False)
        if fields.k_norm is not None:
            k = k * data(fields.k_norm)[:, None]
        if fields.row_places is not None and fields.k_rows is not None and fields.v_rows is not None:
            for index, place in enumerate(data(fields.row_places, "uint8")):
                if place != NO_ROW:
                    k[:, place], v[:, place] = data(fields.k_rows)[:, index], data(fields.v_rows)[:, index]
        return k, v

    def attend(
        self, layer: int, q: Array, before: Sequence[PageRef], own_k: Array, own_v: Array
    ) -> tuple[Array, Array]:
        """Attention of one query `q` [heads, D], after RoPE: over the pages `before` its own as they are stored, and
        over its own page up to itself in 16 bit, `own_k` and `own_v` [tokens, kv_heads, D]. Returns float64 [heads, D],
        and the softmax weight of each of these pages, float64 [heads, pages]."""
        recipe = self._layout.recipe.layers[layer]
        tiles = [self.read(layer, ref) for ref in before] + [(own_k.swapaxes(0, 1), own_v.swapaxes(0, 1))]
        k, v = (np.concatenate(parts, axis=1) for parts in zip(*tiles, strict=True))  # [kv_heads, tokens, D]
        if recipe.before_rope:
            assert self._turn is not None
            if recipe.rotate_k:
                k = k @ np.array(hadamard(k.shape[-1]))
            k = self._turn(k, np.arange(k.shape[1]))
        grouped = q.astype(np.float64).reshape(len(k), -1, q.shape[-1])  # consecutive heads share a kv head
        logits = grouped @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        ends = np.cumsum([tile.shape[1] for tile, _ in tiles])
        mass = [page.sum(-1) for page in np.split(weights, ends[:-1], axis=-1)]
        return (weights @ v).reshape(q.shape), np.stack(mass, -1).reshape(len(q), -1)
