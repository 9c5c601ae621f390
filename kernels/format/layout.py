"""Where each field of a page record lies (picture: docs/kv_layout.md). Pure arithmetic, no torch.

A sealed page is one record of bytes: for each layer the codes, scales and zeros of K and V for all kv heads, and the
token norms. Codes lie along the axis that attention contracts: a K row is one token's channels, a V row is one
channel's tokens. 16-bit rows (`Raw`) are token-major for both.
"""

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

from kernels.format.recipe import Codec, Float8, Integer, LayerRecipe, Raw, Recipe

ALIGNMENT = 16
ITEM_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
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
    but for token norms, which all heads share."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerFields:
    """The fields of one layer. Codes of quantized K: [kv_heads, P, D·bits/8]; of V: [kv_heads, D, P·bits/8].
    Scales and zeros of K: [kv_heads, D]; of V: [kv_heads, P]. Token norms: [P]. Absent fields are None."""

    k_codes: Field
    v_codes: Field
    k_scale: Field | None
    k_zero: Field | None
    v_scale: Field | None
    v_zero: Field | None
    k_norm: Field | None

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the layer in the record."""
        fields = (self.k_codes, self.v_codes, *self.parameters)
        return min(field.offset for field in fields), max(field.offset + field.num_bytes for field in fields)

    @property
    def parameters(self) -> tuple[Field, ...]:
        fields = (self.k_scale, self.k_zero, self.v_scale, self.v_zero, self.k_norm)
        return tuple(field for field in fields if field is not None)


class PageLayout:
    """Byte offsets of every field of a page of `recipe` for a model with these heads and this dtype."""

    def __init__(self, recipe: Recipe, *, num_kv_heads: int, head_dim: int, dtype: str):
        self.recipe = recipe
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._end = 0
        self.layers = tuple(self._place_layer(layer) for layer in recipe.layers)
        self.page_bytes = self._end
        del self._end

    def _place(self, shape: tuple[int, ...], dtype: str) -> Field:
        field = Field(self._end, shape, dtype)
        self._end += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT
        return field

    def _place_codes(self, codec: Codec, rows: int, length: int) -> Field:
        """`rows` x `length` codes a head, packed along `length`; 16-bit values stay token-major."""
        heads, tokens, channels = self.num_kv_heads, self.recipe.page_tokens, self.head_dim
        match codec:
            case Raw():
                return self._place((heads, tokens, channels), self.dtype)
            case Integer(bits):
                if length * bits % 8:
                    raise ValueError(f"{length} codes of {bits} bits do not fill whole bytes")
                return self._place((heads, rows, length * bits // 8), "uint8")
            case Float8():
                return self._place((heads, rows, length), "uint8")

    def _place_layer(self, layer: LayerRecipe) -> LayerFields:
        heads, tokens, channels = self.num_kv_heads, self.recipe.page_tokens, self.head_dim

        def parameter(present: bool, length: int) -> Field | None:
            return self._place((heads, length), "float16") if present else None

        return LayerFields(
            k_codes=self._place_codes(layer.k, tokens, channels),
            v_codes=self._place_codes(layer.v, channels, tokens),
            k_scale=parameter(not isinstance(layer.k, Raw), channels),
            k_zero=parameter(isinstance(layer.k, Integer), channels),
            v_scale=parameter(not isinstance(layer.v, Raw), tokens),
            v_zero=parameter(isinstance(layer.v, Integer), tokens),
            k_norm=self._place((tokens,), "float16") if layer.norm_k else None,
        )

    @property
    def page_tokens(self) -> int:
        return self.recipe.page_tokens

    @property
    def code_bytes(self) -> int:
        """Bytes of codes (or 16-bit values) in a page."""
        return sum(layer.k_codes.num_bytes + layer.v_codes.num_bytes for layer in self.layers)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of scales, zeros and norms in a page, and of the padding that aligns them."""
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
