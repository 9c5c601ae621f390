"""Modules that the engine imports but only needs to read checkpoints: a machine for checks may lack them."""

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

OPTIONAL = ("tokenizers",)
"""What may be missing and has no stand-in: what needs it is left out."""
READERS = {
    "gguf": ("gguf", "gguf.constants", "gguf.quants"),
    "safetensors": ("safetensors", "safetensors.numpy", "safetensors.torch"),
    "jinja2": ("jinja2", "jinja2.sandbox"),
}


def stand_in() -> list[str]:
    """Takes the place of those that are missing, and names them."""
    missing = [name for name in READERS if sys.modules.get(name) is None and find_spec(name) is None]
    for name in missing:
        for module in READERS[name]:
            sys.modules[module] = MagicMock()
    return missing
