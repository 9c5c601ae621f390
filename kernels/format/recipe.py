"""Recipes: which codec K and V use in each layer, and the page geometry. Pure values, no torch.

The axes are KIVI's (arXiv 2402.02750): K has one scale per channel over the tokens of a page, V one per token over
the channels of a head. Rotation and token norm are OScaR's (arXiv 2605.19660, section 3).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Raw:
    """Values stay in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Integer:
    """Asymmetric integers: `x = scale * code + zero`, codes of `bits` bits, scale and zero in fp16."""

    bits: int

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True)
class Float8:
    """8-bit floats under an fp16 scale that maps the largest magnitude to `max_code`; no zero.

    Both formats scale to 448, the largest e4m3 number: e5m2 has range to spare there, and one bound for both keeps
    the scale of ordinary values a normal fp16 number.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def max_code(self) -> float:
        return 448.0

    def __str__(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


Codec = Raw | Integer | Float8


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """How one layer stores K and V.

    `rotate_k`, `rotate_v`: an orthonormal Hadamard rotation over head_dim, K (and Q) after RoPE, V inside the weights.
    `norm_k`: each K token is divided by its norm over all kv heads before the channel scales are taken.
    """

    k: Codec
    v: Codec
    rotate_k: bool = False
    norm_k: bool = False
    rotate_v: bool = False

    @property
    def is_raw(self) -> bool:
        return isinstance(self.k, Raw) and isinstance(self.v, Raw)

    def __str__(self) -> str:
        if self.is_raw:
            return "K and V as they are"
        k = f"K {self.k}" + (" rotated" if self.rotate_k else "") + (" normed" if self.norm_k else "")
        return k + f" per channel, V {self.v}" + (" rotated" if self.rotate_v else "") + " per token"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The codecs of all layers and the geometry of pages: `page_tokens` (P) and `sink_pages` (S)."""

    name: str
    layers: tuple[LayerRecipe, ...]
    page_tokens: int
    sink_pages: int

    @property
    def id(self) -> str:
        """Names the content of pages: equal recipes, and only those, have equal ids."""
        return hashlib.sha256(repr(replace(self, name="")).encode()).hexdigest()[:16]


def _int4(has_k_bias: bool) -> LayerRecipe:
    # A bias on K makes one huge channel pair that rotation would spread over all channels (docs/log.md).
    free = not has_k_bias
    return LayerRecipe(Integer(4), Integer(4), rotate_k=free, norm_k=free, rotate_v=True)


def _same(codec: Codec) -> Callable[[bool], LayerRecipe]:
    return lambda has_k_bias: LayerRecipe(codec, codec)


RECIPES: dict[str, Callable[[bool], LayerRecipe]] = {
    "native": _same(Raw()),
    "int8": _same(Integer(8)),
    "int4": _int4,
    "fp8_e5m2": _same(Float8(5, 2)),
    "fp8_e4m3": _same(Float8(4, 3)),
    "kivi4": _same(Integer(4)),
    "kivi2": _same(Integer(2)),
}
RECIPE_NAMES = tuple(RECIPES)


def named_recipe(name: str, *, num_layers: int, has_k_bias: bool, page_tokens: int, sink_pages: int) -> Recipe:
    """The recipe called `name` for a model. `native` pages are 16-bit already, so it has no sink pages."""
    layer = RECIPES[name](has_k_bias)
    return Recipe(name, (layer,) * num_layers, page_tokens, 0 if layer.is_raw else sink_pages)
