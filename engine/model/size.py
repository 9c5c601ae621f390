"""How large a model is, from its description alone."""

from math import prod

from engine.config import ModelConfig
from engine.model.checkpoint import expected_tensors


def num_parameters(config: ModelConfig) -> int:
    """Numbers in all weights; embeddings that are tied to the output count once."""
    return sum(prod(shape) for shape in expected_tensors(config).values())
