"""Which model a checkpoint is, so that a calibrated recipe is used with no other."""

import hashlib

import torch

from engine.model.checkpoint import Checkpoint
from engine.recipe_file import ModelIdentity

NUM_ELEMENTS = 1024


def identify(checkpoint: Checkpoint) -> ModelIdentity:
    """From the description and a sample of the weights that K and V come from, of every layer, as they are stored."""
    config = checkpoint.config
    digest = hashlib.sha256(f"{config.vocab_size} {config.num_heads} {config.rope}".encode())
    names = [f"layers.{index}.{part}.weight" for index in range(config.num_layers)
             for part in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj")]  # fmt: skip
    for name in (*names, f"layers.{config.num_layers - 1}.mlp.down_proj.weight", "norm.weight"):
        flat = checkpoint.tensor(f"model.{name}").flatten()
        # an odd step does not stay in one column
        sample = flat[:: (flat.numel() // NUM_ELEMENTS) | 1].float().contiguous()
        digest.update(f"{name} {flat.numel()}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().data)
    return ModelIdentity(
        name=checkpoint.name,
        architecture=config.architecture,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        weights=digest.hexdigest()[:32],
    )
