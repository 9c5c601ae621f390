"""Recipes for the tiny model that no name stands for."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.format.codec import Float8, Integer, Parameters, Store, per_channel, per_token, raw
from kernels.format.recipe import LayerRecipe, Recipe, SinkRule

BEFORE_ROPE = LayerRecipe(raw(), raw(), before_rope=True)
INT4 = LayerRecipe(per_channel(Integer(4)), per_token(Integer(4)), rotate_k=True, norm_k=True, rotate_v=True)
INT4_BEFORE_ROPE = replace(INT4, before_rope=True)
FLOAT8 = LayerRecipe(*[Store(Float8(5, 2), None, None, Parameters.UNIT)] * 2)
"""Numbers are cut to e5m2 and nothing else: `as_float8` says the same without any of our code."""


def as_float8(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e5m2).double()


def recipe(
    *layers: LayerRecipe,
    page_tokens: int = 32,
    sink_pages: int = 1,
    window_pages: int = 0,
    sink_rule: SinkRule | None = None,
) -> Recipe:
    """`layers` of one model, or one that stands for both of the tiny model's."""
    return Recipe("test", layers if len(layers) > 1 else layers * 2, page_tokens, sink_pages, window_pages, sink_rule)
