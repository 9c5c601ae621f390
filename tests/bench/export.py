"""The demo model as a folder in Hugging Face layout, for programs that read no GGUF or keep it packed."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import DefaultRope
from engine.model.checkpoint import expected_tensors, open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME


def export_demo(folder: Path, dtype: torch.dtype) -> Path:
    """Write config.json and model.safetensors into `folder`; no tokenizer."""
    checkpoint = open_checkpoint(DEMO_NAME)
    config = checkpoint.config
    assert isinstance(config.rope, DefaultRope)
    raw = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": sorted(config.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    weights = {name: checkpoint.tensor(name).to(dtype).contiguous() for name in expected_tensors(config)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
