"""The recipes that have names. Pure values, no torch. What they lose: docs/fidelity.md."""

from collections.abc import Callable

from kernels.format.codec import (
    Float8,
    Integer,
    Parameters,
    Quantizer,
    Store,
    Symmetric,
    Table,
    per_channel,
    per_token,
    raw,
)
from kernels.format.recipe import LayerRecipe, Recipe

E4M3, E5M2 = Float8(4, 3), Float8(5, 2)
MAGNITUDES = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, and zero
E2M1 = Table.nearest(
    tuple(x / 6 for x in (*(-m for m in reversed(MAGNITUDES)), 0.0, *MAGNITUDES)), is_centred=True, name="e2m1 fp"
)
ForModel = Callable[[bool], LayerRecipe]
"""The recipe of every layer of a model that has a bias on K, or has none."""


def _plain(k: Store, v: Store) -> ForModel:
    return lambda has_k_bias: LayerRecipe(k, v)


def _kivi(codec: Quantizer, parameters: Parameters = Parameters.HALF) -> ForModel:
    """KIVI's axes (arXiv 2402.02750): K per channel over the page, V per token over the head."""
    return _plain(per_channel(codec, None, parameters), per_token(codec, None, parameters))


def _rotated(k: Quantizer, v: Store, *, group: int = 32, clip: float = 1.0, biased_group: int | None = 32) -> ForModel:
    """K per channel in groups of `group` tokens. A bias on K makes one huge pair of channels, which a rotation would
    spread over all of them (docs/log.md); and a channel that hardly varies around it needs its zero in fp16."""

    def recipe(has_k_bias: bool) -> LayerRecipe:
        if has_k_bias:
            return LayerRecipe(per_channel(k, biased_group), v, rotate_v=True)
        store = per_channel(k, group, Parameters.BYTE, clip)
        return LayerRecipe(store, v, rotate_k=True, norm_k=True, rotate_v=True, balance_k=True)

    return recipe


def _both_rotated(k: Store, v: Store) -> ForModel:
    return lambda has_k_bias: LayerRecipe(k, v, rotate_k=True, rotate_v=True)


def _bytes(bits: int, group: int = 32) -> Store:
    """V per token in groups of channels."""
    return per_token(Integer(bits), group, Parameters.BYTE)


RECIPES: dict[str, ForModel] = {
    "native": _plain(raw(), raw()),
    "int8": _kivi(Integer(8)),
    "int4": _rotated(Integer(4), _bytes(4, 64), group=16, biased_group=None),
    "k4v2": _rotated(Integer(4), _bytes(2, 16), biased_group=None),
    "int3": _rotated(Integer(3), _bytes(3)),
    "k3v2": _rotated(Integer(3), _bytes(2)),
    "int2": _rotated(Integer(2), _bytes(2), clip=0.85),
    "fp8_e5m2": _kivi(E5M2),
    "fp8_e4m3": _kivi(E4M3),
    # points of reference: the literature's plain forms, and what other servers do
    "kivi4": _kivi(Integer(4)),
    "kivi2": _kivi(Integer(2)),
    "kivi2_32": _plain(per_channel(Integer(2), 32), per_token(Integer(2), 32)),
    "token8": _plain(per_token(Integer(8)), per_token(Integer(8))),
    "token4": _plain(per_token(Integer(4)), per_token(Integer(4))),
    "hf4": _plain(per_token(Integer(4), 64), per_token(Integer(4), 64)),
    "token4_rot": _both_rotated(per_token(Integer(4)), per_token(Integer(4))),
    "q8_0": _both_rotated(per_token(Symmetric(8), 32), per_token(Symmetric(8), 32)),
    "q4_0": _both_rotated(per_token(Symmetric(4), 32), per_token(Symmetric(4), 32)),
    "nvfp4": _plain(per_token(E2M1, 16, Parameters.BYTE), per_token(E2M1, 16, Parameters.BYTE)),
    "fp8_e5m2_unit": _kivi(E5M2, Parameters.UNIT),
    "fp8_e4m3_unit": _kivi(E4M3, Parameters.UNIT),
}
RECIPE_NAMES = tuple(RECIPES)


def named_recipe(
    name: str, *, num_layers: int, has_k_bias: bool, page_tokens: int, sink_pages: int, window_pages: int = 0
) -> Recipe:
    """The recipe called `name` for a model. `native` pages are 16-bit already, so it has no sinks and no window."""
    layer = RECIPES[name](has_k_bias)
    if layer.is_raw:
        sink_pages = window_pages = 0
    return Recipe(name, (layer,) * num_layers, page_tokens, sink_pages, window_pages)
