"""What tests of `quire inspect` share: a model folder with a planted outlier channel of K and a planted sink."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model_folders import byte_tokenizer, tiny_config, tiny_weights, write_model_folder

TEXT = "".join(f"Line {number} of a text that nobody wrote. " for number in range(40))
SINK_TEXT = "@"
SINK_CHANNEL = 5
SINK_LAYER = 1
OUTLIER_HEAD, OUTLIER_CHANNEL = 1, 2


def token_ids(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


def planted_weights() -> dict[str, Tensor]:
    """Three layers of which the first adds nothing to the residual stream. In the second, one neuron of the MLP answers
    to a channel that only one token's embedding has, and writes to one channel."""
    weights = tiny_weights(tiny_config(num_hidden_layers=3))
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.0.{name}.weight"].zero_()
    weights["model.layers.1.self_attn.o_proj.weight"].zero_()
    weights["model.layers.0.self_attn.k_proj.weight"][OUTLIER_HEAD * 4 + OUTLIER_CHANNEL] *= 40
    embedding, place = weights["model.embed_tokens.weight"], token_ids(SINK_TEXT)[0]
    embedding[:, 9] = 0.0
    embedding[place] = 0.3 * F.one_hot(torch.tensor(9), 16)
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.{SINK_LAYER}.mlp.{name}.weight"][7] = 2.0 * F.one_hot(torch.tensor(9), 16)
    down = torch.zeros(16, 24)
    down[SINK_CHANNEL, 7] = 1.0
    weights[f"model.layers.{SINK_LAYER}.mlp.down_proj.weight"] = down
    weights["model.layers.2.self_attn.o_proj.weight"].zero_()
    weights["model.layers.2.mlp.down_proj.weight"].zero_()
    return weights


def planted_folder(folder: Path, weights: dict[str, Tensor] | None = None) -> Path:
    return write_model_folder(folder, tiny_config(num_hidden_layers=3), weights or planted_weights())


def normalised_embeddings(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """What the first layer projects, float64 [tokens, 16]: RMSNorm with weights of 1."""
    x = weights["model.embed_tokens.weight"][tokens].double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def planted_residual(weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """The residual stream behind the second layer, float64 [tokens, 16]."""
    hidden = weights["model.embed_tokens.weight"][tokens].double()
    normal = normalised_embeddings(weights, tokens)
    gate, up = (
        normal @ weights[f"model.layers.{SINK_LAYER}.mlp.{name}.weight"].double().T for name in ("gate_proj", "up_proj")
    )
    return (
        hidden
        + (gate * torch.sigmoid(gate) * up) @ weights[f"model.layers.{SINK_LAYER}.mlp.down_proj.weight"].double().T
    )
