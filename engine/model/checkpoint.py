"""A model as it lies on disk: its description, its weights by name, its tokenizer."""

import os
from pathlib import Path
from typing import Protocol

import torch

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.demo_checkpoint import DEMO_NAME, DemoCheckpoint
from engine.model.folder_checkpoint import FolderCheckpoint
from engine.model.hub import fetch, is_hub_name
from engine.request import SamplingDefaults
from engine.tokenizer import Tokenizer


class Checkpoint(Protocol):
    """Weights go by their Hugging Face names, such as `model.layers.0.self_attn.q_proj.weight`."""

    @property
    def name(self) -> str:
        """What clients call the model."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def sampling_defaults(self) -> SamplingDefaults: ...

    def tensor(self, name: str) -> torch.Tensor:
        """The weight, on the CPU, in the type it is stored in (float32 if it is stored quantized)."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The weight's shape without reading its data; None if there is no such weight."""

    def file(self, name: str) -> str:
        """The file that holds, or would hold, the weight: for messages."""

    def tokenizer(self) -> Tokenizer: ...


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Open the demo model by its name, a folder in Hugging Face layout by its path, or a model of a hub by its name,
    at `revision`: what of it is not in the cache is downloaded. A folder goes before a hub.

    All shapes are compared with config.json; no weight is read. Raises StartupError for anything that is missing,
    damaged, inconsistent or not supported.
    """
    checkpoint: Checkpoint
    is_local = model == DEMO_NAME or os.path.isdir(model)
    if is_local and revision is not None:
        raise StartupError(f"--revision is given, but {model} does not come from a hub; leave it out")
    if model == DEMO_NAME:
        checkpoint = DemoCheckpoint()
    elif is_local:
        checkpoint = FolderCheckpoint(Path(model))
    elif is_hub_name(model):
        checkpoint = FolderCheckpoint(fetch(model, revision), model)
    else:
        shown = model if len(model) <= 200 else model[:200] + "..."
        if model.startswith(("/", "./", "../")) and not os.path.exists(model):
            raise StartupError(
                f"model {shown!r}: there is no such folder that user {os.geteuid()} may see; check the path, and in a "
                "container that the folder is mounted there"
            )
        raise StartupError(
            f"model {shown!r} is not known; expected {DEMO_NAME} or the path of a folder with config.json, "
            "*.safetensors and tokenizer.json, or ORG/NAME of a model on the Hugging Face hub"
        )
    check_shapes(checkpoint)
    return checkpoint


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight that a model of this description has, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = [
        ("self_attn.q_proj", q_width, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_width, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_width, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes |= {f"{prefix}self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raise StartupError for the first weight that is missing or has another shape than the config expects.

    Weights that the config does not ask for, such as stored rotary frequencies, are ignored.
    """
    for name, expected in expected_tensors(checkpoint.config).items():
        found = checkpoint.shape(name)
        if found != expected:
            has = "is missing" if found is None else f"has shape {list(found)}"
            raise StartupError(f"{checkpoint.file(name)}: tensor {name} {has}, config.json expects {list(expected)}")
