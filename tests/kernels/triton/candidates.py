"""The Triton backend as the kernel checks take it, and the layouts that it is checked with."""

import torch

from kernels.format.layout import PageLayout
from kernels.format.named import RECIPE_NAMES
from kernels.triton.backend import TritonBackend
from tests.kernels.builders import ODD_RECIPES
from tests.kernels.checks import HALF_ULP, LAYER, Candidate, Rounding

UNSERVED = ("outliers", "marked rows")  # they keep single numbers in 16 bit


def triton_rounding(layout: PageLayout, is_decode: bool) -> Rounding:
    """In a model of fp32 nothing is rounded. Else tiles are fp16, those of a layer that stays raw in the model's dtype.

    Logits: the query; a key's value, its zero, its scale or the number of its table, and twice more where it is turned
    when it is read. Values: the weight; the value, its zero, and its scale or the number of its table.
    """
    if layout.dtype == "float32":
        return Rounding()
    recipe = layout.recipe.layers[LAYER]
    unit = HALF_ULP[layout.dtype if recipe.is_raw else "float16"]
    return Rounding(unit, of_logits=6 if recipe.before_rope else 4, of_values=4)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = Candidate(
    "triton", lambda pool, rotary, num_heads: TritonBackend(pool, rotary, num_heads=num_heads), triton_rounding, DEVICE
)
INVARIANT_TRITON = Candidate(
    "invariant triton",
    lambda pool, rotary, num_heads: TritonBackend(pool, rotary, num_heads=num_heads, is_invariant=True),
    triton_rounding,
    DEVICE,
)
SERVED = [name for name in (*RECIPE_NAMES, *ODD_RECIPES) if name not in UNSERVED]
