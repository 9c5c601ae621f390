"""Tiny random models in Hugging Face's folder layout."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.model.checkpoint import expected_tensors
from engine.model.describe import describe

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A config.json of 2 layers; a change to None removes the field."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 258,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 257,
    }
    return {name: value for name, value in (raw | changes).items() if value is not None}


def tiny_weights(raw: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(describe(raw))
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token for each byte, then `<s>` (256) and `</s>` (257)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return backend


def write_model_folder(
    folder: Path, raw: dict[str, Any] | None = None, weights: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> Path:
    """Write a whole model; several `shards` come with an index."""
    raw = raw or tiny_config()
    weights = weights or tiny_weights(raw)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", raw)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "chat_template": CHAT_TEMPLATE},
    )
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
