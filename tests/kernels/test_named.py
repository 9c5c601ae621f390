"""The few recipes that slow tests run have all that named recipes are made of."""

from kernels.format.codec import Raw
from kernels.format.named import RECIPE_NAMES, RECIPES
from kernels.format.recipe import LayerRecipe
from tests.helpers import COVERING_RECIPES


def traits(name: str) -> set[object]:
    """What matters to whoever handles pages: kinds of codecs, parameters and groups, and what is done to K and V."""
    layer = RECIPES[name](False)
    found: set[object] = {(field, getattr(layer, field)) for field in LayerRecipe.__slots__ if field not in ("k", "v")}
    for side, store in (("k", layer.k), ("v", layer.v)):
        found |= {(side, type(store.codec)), (side, store.is_per_channel), ("clip", store.clip != 1)}
        if not isinstance(store.codec, Raw):
            size = store.group_tokens if store.is_per_channel else store.group_channels
            found |= {(side, store.parameters), (side, "groups", size is not None)}
    return found


def test_the_recipes_of_slow_tests_have_all_that_the_others_have():
    assert set().union(*map(traits, COVERING_RECIPES)) == set().union(*map(traits, RECIPE_NAMES))
