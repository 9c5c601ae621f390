"""Where each field of a page record lies (picture: docs/kv_layout.md). Pure arithmetic, no torch.

A sealed page is one record of bytes: for each layer the codes, scales and zeros of K and V for all kv heads, and the
token norms. Codes lie along the axis that attention contracts: a K row is one token's channels, a V row is one
channel's tokens. 16-bit rows (`Raw`) are token-major for both.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import gcd, prod
from typing import NamedTuple

from kernels.format.codec import Codec, Parameters, Raw, Store, has_zero
from kernels.format.recipe import LayerRecipe, Recipe

ALIGNMENT = 16
ITEM_BYTES = {"uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "float32": 4}
NULL_PAGE = 0


class Pool(Enum):
    OPEN = "open"
    SEALED = "sealed"


class PageRef(NamedTuple):
    """A page's place: a slot of the open pool or a page of the sealed pool."""

    pool: Pool
    id: int


@dataclass(frozen=True, slots=True)
class Field:
    """A contiguous array inside the record. `offset` is in bytes; the first axis of `shape` is the kv head,
    but for what all heads share."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoreFields:
    """The fields of K or of V. Absent fields are None.

    `codes` of K: [kv_heads, P, D·bits/8]; of V: [kv_heads, D, P·bits/8]. `scale`, `zero`: [kv_heads, P/group_tokens,
    D/group_channels]; `factor` [kv_heads]: of 8-bit scales. `outlier_places` int16 [P, n], in [0, kv_heads·D), and
    `outlier_values` fp16 [P, n]: numbers of each token that take the place of what the codes say.
    """

    store: Store
    group_tokens: int
    group_channels: int
    codes: Field
    scale: Field | None
    zero: Field | None
    factor: Field | None
    outlier_places: Field | None
    outlier_values: Field | None

    @property
    def parameters(self) -> tuple[Field, ...]:
        fields = (self.scale, self.zero, self.factor, self.outlier_places, self.outlier_values)
        return tuple(field for field in fields if field is not None)


@dataclass(frozen=True, slots=True)
class LayerFields:
    """The fields of one layer. `k_norm` fp16 [P]: the norms of tokens. `row_places` uint8 [n]: tokens of the page whose
    rows are kept, `NO_ROW` where there is none; `k_rows`, `v_rows` [kv_heads, n, D] in the model's dtype."""

    k: StoreFields
    v: StoreFields
    k_norm: Field | None
    row_places: Field | None
    k_rows: Field | None
    v_rows: Field | None

    @property
    def fields(self) -> Iterator[Field]:
        yield from (self.k.codes, self.v.codes, *self.k.parameters, *self.v.parameters)
        yield from (field for field in (self.k_norm, self.row_places, self.k_rows, self.v_rows) if field is not None)

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the layer in the record, padding included."""
        end = max(field.offset + field.num_bytes for field in self.fields)
        return min(field.offset for field in self.fields), aligned(end)


NO_ROW = 255


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


class PageLayout:
    """Byte offsets of every field of a page of `recipe` for a model with these heads and this dtype.

    Raises ValueError where codes of a row do not fill whole bytes.
    """

    def __init__(self, recipe: Recipe, *, num_kv_heads: int, head_dim: int, dtype: str):
        self.recipe = recipe
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._end = 0
        self.layers = tuple(self._place_layer(layer) for layer in recipe.layers)
        self.page_bytes = self._end
        del self._end

    def _place(self, shape: tuple[int, ...], dtype: str, is_present: bool = True) -> Field | None:
        return self._put(shape, dtype) if is_present else None

    def _put(self, shape: tuple[int, ...], dtype: str) -> Field:
        field = Field(self._end, shape, dtype)
        self._end += aligned(field.num_bytes)
        return field

    def _place_codes(self, codec: Codec, rows: int, length: int) -> Field:
        """`rows` x `length` codes a head, packed along `length`; 16-bit values stay token-major."""
        heads, tokens, channels = self.num_kv_heads, self.recipe.page_tokens, self.head_dim
        if isinstance(codec, Raw):
            return self._put((heads, tokens, channels), self.dtype)
        unit = 8 if codec.bits == 3 else 8 // codec.bits  # 3 bits are planes of 2 and planes of 1
        if length % unit:
            raise ValueError(f"{length} codes of {codec.bits} bits do not fill whole bytes")
        return self._put((heads, rows, length * codec.bits // 8), "uint8")

    def _place_layer(self, layer: LayerRecipe) -> LayerFields:
        heads, tokens, channels = self.num_kv_heads, self.recipe.page_tokens, self.head_dim
        k_codes = self._place_codes(layer.k.codec, tokens, channels)
        v_codes = self._place_codes(layer.v.codec, channels, tokens)
        k, v = self._place_store(layer.k, k_codes), self._place_store(layer.v, v_codes)
        num_rows = layer.outliers.num if layer.outliers else 0
        return LayerFields(
            k,
            v,
            k_norm=self._place((tokens,), "float16", layer.norm_k),
            row_places=self._place((num_rows,), "uint8", num_rows > 0),
            k_rows=self._place((heads, num_rows, channels), self.dtype, num_rows > 0),
            v_rows=self._place((heads, num_rows, channels), self.dtype, num_rows > 0),
        )

    def _place_store(self, store: Store, codes: Field) -> StoreFields:
        heads, tokens, channels = self.num_kv_heads, self.recipe.page_tokens, self.head_dim
        group_tokens, group_channels = gcd(store.group_tokens or 0, tokens), gcd(store.group_channels or 0, channels)
        shape = (heads, tokens // group_tokens, channels // group_channels)
        is_scaled = not isinstance(store.codec, Raw) and store.parameters is not Parameters.UNIT
        is_byte = store.parameters is Parameters.BYTE
        return StoreFields(
            store,
            group_tokens,
            group_channels,
            codes,
            scale=self._place(shape, "uint8" if is_byte else "float16", is_scaled),
            zero=self._place(shape, "int8" if is_byte else "float16", is_scaled and has_zero(store.codec)),
            factor=self._place((heads,), "float16", is_scaled and is_byte),
            outlier_places=self._place((tokens, store.num_outliers), "int16", store.num_outliers > 0),
            outlier_values=self._place((tokens, store.num_outliers), "float16", store.num_outliers > 0),
        )

    @property
    def page_tokens(self) -> int:
        return self.recipe.page_tokens

    @property
    def num_elements(self) -> int:
        """Numbers of K and V in a page."""
        return len(self.layers) * 2 * self.num_kv_heads * self.page_tokens * self.head_dim

    @property
    def bits_per_element(self) -> float:
        """From the bytes of the record: codes, parameters and padding."""
        return self.page_bytes * 8 / self.num_elements

    @property
    def code_bytes(self) -> int:
        """Bytes of codes (or 16-bit values) in a page."""
        return sum(layer.k.codes.num_bytes + layer.v.codes.num_bytes for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of scales, zeros, norms and outliers in a page, and of the padding that aligns them."""
        return self.page_bytes - self.code_bytes

    @property
    def slot_shape(self) -> tuple[int, int, int, int, int]:
        """An open page: [layers, 2 (K, V), kv_heads, P, D] in the model's dtype."""
        return (len(self.layers), 2, self.num_kv_heads, self.page_tokens, self.head_dim)

    @property
    def slot_bytes(self) -> int:
        return prod(self.slot_shape) * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> float:
        return self.page_bytes / self.page_tokens
