"""The recipes that have names. Pure values, no torch."""

from collections.abc import Callable

from kernels.format.codec import Codec, Float8, Integer, Raw, Store, per_channel, per_token, raw
from kernels.format.recipe import LayerRecipe, Recipe


def _kivi(codec: Codec) -> Callable[[bool], LayerRecipe]:
    """KIVI's axes (arXiv 2402.02750): K per channel over the page, V per token over the head."""
    if isinstance(codec, Raw):
        return lambda has_k_bias: LayerRecipe(raw(), raw())
    return lambda has_k_bias: LayerRecipe(per_channel(codec), per_token(codec))


def _rotated(k: Store, v: Store) -> Callable[[bool], LayerRecipe]:
    # A bias on K makes one huge channel pair that rotation would spread over all channels (docs/log.md).
    def recipe(has_k_bias: bool) -> LayerRecipe:
        is_free = not has_k_bias
        return LayerRecipe(k, v, rotate_k=is_free, norm_k=is_free, rotate_v=True, balance_k=is_free)

    return recipe


RECIPES: dict[str, Callable[[bool], LayerRecipe]] = {
    "native": _kivi(Raw()),
    "int8": _kivi(Integer(8)),
    "int4": _rotated(per_channel(Integer(4)), per_token(Integer(4))),
    "fp8_e5m2": _kivi(Float8(5, 2)),
    "fp8_e4m3": _kivi(Float8(4, 3)),
    "kivi4": _kivi(Integer(4)),
    "kivi2": _kivi(Integer(2)),
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
