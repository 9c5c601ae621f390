"""What a kernel must know of a layer's pages: one value, passed as `tl.constexpr`, so that equal layers share a kernel.

Byte offsets count from the layer's first byte in the record. Fields that a recipe lacks have offset 0, and a question
`has_*` or a count says that they are absent.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernels.format.codec import Centred, Codec, Float8, Integer, Parameters, Raw, Symmetric, Table, zero_unit
from kernels.format.layout import Field, PageLayout, StoreFields
from kernels.format.recipe import LargestValues, LayerRecipe
from kernels.triton.unpack import is_half, unpack_e4m3, unpack_e5m2, unpack_integers, unpack_parameters

HEAD_DIMS = (64, 128, 256)
PAGE_TOKENS = (64, 128)
TABLE_LENGTH = 16
LARGEST_GROUP = 16
LARGEST_PAGE = 128 * 128  # numbers of a head; a tile of more does not fit the memory of a program


@dataclass(frozen=True)
class StoreSpec:
    """K or V of one layer. `planes`: parts of a row of codes whose numbers lie next to each other, `[L / planes]` each
    (3 bits: of the two low bits). Numbers are those of a table from `table_place` on, the float8's, else the codes; the
    dequantized value is `scale * number + zero`."""

    bits: int
    planes: int
    is_raw: bool
    is_float8: bool
    exponent_bits: int
    is_table: bool
    table_place: int
    bounds: tuple[float, ...]
    max_code: float
    scale_divisor: float
    is_signed: bool
    has_scale: bool
    has_zero: bool
    is_byte: bool
    centre: float
    zero_unit: float
    clip: float
    group_tokens: int
    group_channels: int
    codes: int
    scale: int
    zero: int
    factor: int

    @property
    def unpackers(self) -> tuple[str, ...]:
        """PTX that makes numbers of the bytes of each plane; of 3 bits, of codes whose planes are together already."""
        if self.is_float8:
            return (unpack_e5m2() if self.exponent_bits == 5 else unpack_e4m3(),)
        if self.bits == 3:
            return (unpack_integers(8, 0),)
        return tuple(unpack_integers(self.bits, plane) for plane in range(self.planes))

    @property
    def has_words(self) -> bool:
        """Whether parameters are unpacked four at a time."""
        return self.is_byte and self.has_zero and is_half(1152 * self.zero_unit)

    @property
    def unpacker_of_parameters(self) -> str:
        """PTX that makes scales and zeros of words of bytes."""
        return unpack_parameters(self.zero_unit)

    @property
    def num_bounds(self) -> int:
        return len(self.bounds)


@dataclass(frozen=True)
class LayerSpec:
    """K and V of one layer, and what tokens have beside codes. `num_rows` tokens of a page are kept in 16 bit: those
    with the largest V where `keeps_largest`, else those that a sink rule marks. `is_interpreted`: no PTX.
    `source`: what the kernels are made from. Triton's cache of compiled kernels knows a constexpr by its fields alone,
    not by the properties and constants behind them."""

    k: StoreSpec
    v: StoreSpec
    num_kv_heads: int
    page_tokens: int
    head_dim: int
    has_norm: bool
    k_norm: int
    num_rows: int
    keeps_largest: bool
    row_places: int
    k_rows: int
    v_rows: int
    before_rope: bool
    is_rotated_before_rope: bool
    is_interpreted: bool
    source: str

    @property
    def is_raw(self) -> bool:
        return self.k.is_raw and self.v.is_raw


def store_spec(fields: StoreFields, start: int, table_place: int) -> StoreSpec:
    """`start`: where the layer begins in the record; `table_place`: where its table is, if it has one."""
    codec, store = fields.store.codec, fields.store

    def offset(field: Field | None) -> int:
        return 0 if field is None else field.offset - start

    bits = 16 if isinstance(codec, Raw) else codec.bits
    return StoreSpec(
        bits=bits,
        planes=1 if bits >= 8 else 4 if bits == 3 else 8 // bits,
        is_raw=isinstance(codec, Raw),
        is_float8=isinstance(codec, Float8),
        exponent_bits=codec.exponent_bits if isinstance(codec, Float8) else 0,
        is_table=isinstance(codec, Table),
        table_place=table_place,
        bounds=codec.bounds if isinstance(codec, Table) else (),
        max_code=0.0 if isinstance(codec, Raw) else float(codec.max_code),
        scale_divisor=_scale_divisor(codec),
        is_signed=isinstance(codec, Symmetric) and codec.bits < 8,
        has_scale=fields.scale is not None,
        has_zero=fields.zero is not None,
        is_byte=store.parameters is Parameters.BYTE,
        centre=float(codec.centre) if isinstance(codec, Centred | Symmetric) else 0.0,
        zero_unit=0.0 if isinstance(codec, Raw | Float8) else zero_unit(codec),
        clip=store.clip,
        group_tokens=fields.group_tokens,
        group_channels=fields.group_channels,
        codes=offset(fields.codes),
        scale=offset(fields.scale),
        zero=offset(fields.zero),
        factor=offset(fields.factor),
    )


def _scale_divisor(codec: Codec) -> float:
    """What the range of a block is divided by: max - min, its number of largest magnitude, or that magnitude."""
    match codec:
        case Integer() | Float8():
            return float(codec.max_code)
        case Centred():
            return codec.centre
        case Symmetric(bits):
            return float(codec.max_code - codec.centre if bits == 8 else -codec.centre)
        case Table(is_centred=False):
            return 2.0
    return 1.0


def layer_spec(layout: PageLayout, layer: int, *, is_interpreted: bool = False) -> LayerSpec:
    """`is_interpreted`: for Triton's interpreter, which knows no PTX."""
    fields, recipe = layout.layers[layer], layout.recipe.layers[layer]
    start, _ = fields.span

    def offset(field: Field | None) -> int:
        return 0 if field is None else field.offset - start

    return LayerSpec(
        k=store_spec(fields.k, start, 0),
        v=store_spec(fields.v, start, TABLE_LENGTH),
        num_kv_heads=layout.num_kv_heads,
        page_tokens=layout.page_tokens,
        head_dim=layout.head_dim,
        has_norm=fields.k_norm is not None,
        k_norm=offset(fields.k_norm),
        num_rows=recipe.outliers.num if recipe.outliers else 0,
        keeps_largest=isinstance(recipe.outliers, LargestValues),
        row_places=offset(fields.row_places),
        k_rows=offset(fields.k_rows),
        v_rows=offset(fields.v_rows),
        before_rope=recipe.before_rope,
        is_rotated_before_rope=recipe.before_rope and recipe.rotate_k,
        is_interpreted=is_interpreted,
        source=source_digest(),
    )


def codebook_values(layout: PageLayout, layer: int) -> list[float]:
    """The tables of K and V behind each other, where they have any. NaN is for codes that are never stored, which can
    lie in a page that nobody wrote."""
    recipe = layout.recipe.layers[layer]
    values: list[float] = []
    for store in (recipe.k, recipe.v):
        table = store.codec.values if isinstance(store.codec, Table) else ()
        values += [*table, *[math.nan] * (TABLE_LENGTH - len(table))]
    return values


@cache
def source_digest() -> str:
    """Of the files of this package."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def why_unsupported(layout: PageLayout, num_heads: int) -> str | None:
    """The reason that these kernels cannot serve `layout` for a model with `num_heads` query heads, with what they can;
    None where they can."""
    if layout.head_dim not in HEAD_DIMS:
        return f"head_dim is {layout.head_dim}; the Triton kernels take {_listed(HEAD_DIMS)}"
    if layout.page_tokens not in PAGE_TOKENS:
        return f"a page has {layout.page_tokens} tokens; the Triton kernels take {_listed(PAGE_TOKENS)}"
    if (group := num_heads // layout.num_kv_heads) > LARGEST_GROUP:
        return f"{group} query heads share a KV head; the Triton kernels take {LARGEST_GROUP} at most"
    if layout.head_dim * layout.page_tokens > LARGEST_PAGE:
        return f"a page has {layout.page_tokens} tokens of head_dim {layout.head_dim}; that takes pages of 64 tokens"
    if layout.head_dim > 128 and any(recipe.before_rope for recipe in layout.recipe.layers):
        return f"head_dim is {layout.head_dim} and K is stored before RoPE; for that the Triton kernels take 64 or 128"
    return next((reason for recipe in layout.recipe.layers if (reason := _why_not_layer(recipe))), None)


def _why_not_layer(recipe: LayerRecipe) -> str | None:
    for store in (recipe.k, recipe.v):
        if isinstance(store.codec, Table) and len(store.codec.values) > TABLE_LENGTH:
            return f"{store.codec} has {len(store.codec.values)} values; the Triton kernels take {TABLE_LENGTH} at most"
    if recipe.k.num_outliers or recipe.v.num_outliers:
        return f"the recipe keeps single numbers in 16 bit ({recipe}); the Triton kernels keep whole tokens only"
    return None


def _listed(values: tuple[int, ...]) -> str:
    return f"{', '.join(str(value) for value in values[:-1])} or {values[-1]}"
