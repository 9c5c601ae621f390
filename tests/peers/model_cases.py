"""Tiny random models and RoPE settings of real ones, for which transformers gives the expected numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.model.checkpoint import expected_tensors
from engine.model.describe import describe
from tests.helpers import random_prompt
from tests.model_folders import write_model_folder

ORIGINAL = 64  # the context before scaling
VOCAB = 48
QWEN = {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}  # a window that is not used
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A config.json, and how many tokens run through the model. Logits are compared at `positions`."""

    raw: dict[str, Any]
    num_tokens: int = 200
    positions: tuple[int, ...] = (19, 63, 64, 79, 130, 198)

    @property
    def tokens(self) -> list[int]:
        return random_prompt(11, self.num_tokens, VOCAB)

    def write(self, folder: Path) -> Path:
        return write_model_folder(folder, self.raw, exact_weights(self.raw))


@dataclass(frozen=True, slots=True)
class RopeCase:
    """A config.json, and the longest context."""

    raw: dict[str, Any]
    length: int


def model_cases() -> dict[str, ModelCase]:
    dynamic = {"rope_type": "dynamic", "factor": 4.0}
    return {
        "mistral": ModelCase(_raw("Mistral", sliding_window=None, rope_theta=1e6, head_dim=16)),
        "qwen3": ModelCase(_raw("Qwen3", **QWEN, head_dim=16, layer_types=["full_attention"] * 2, rope_theta=1e6)),
        "qwen3 yarn bias": ModelCase(
            _raw(
                "Qwen3",
                **QWEN,
                head_dim=16,
                attention_bias=True,
                max_position_embeddings=80,
                rope_scaling={"rope_type": "yarn", **YARN},
            )
        ),
        "qwen2 yarn": ModelCase(
            _raw("Qwen2", **QWEN, max_position_embeddings=ORIGINAL, rope_scaling={"type": "yarn", **YARN})
        ),
        "llama yarn": ModelCase(
            _raw(
                "Llama",
                rope_theta=None,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 500.0,
                    "beta_fast": 8,
                    "beta_slow": 0.5,
                    "mscale": 2.0,
                    "mscale_all_dim": 0.5,
                    "truncate": False,
                    **YARN,
                },
            )
        ),
        "llama dynamic": ModelCase(_raw("Llama", max_position_embeddings=ORIGINAL, rope_scaling=dynamic)),
        "llama dynamic, short": ModelCase(
            _raw("Llama", max_position_embeddings=ORIGINAL, rope_scaling=dynamic), ORIGINAL, (19, 40, 62)
        ),
        "mistral dynamic": ModelCase(
            _raw(
                "Mistral",
                sliding_window=None,
                max_position_embeddings=100,
                rope_theta=None,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 5e4, "factor": 2.5},
            )
        ),
    }


def rope_cases() -> dict[str, RopeCase]:
    """As Qwen2.5, Qwen3, DeepSeek-V2, gpt-oss and InternLM2 state them, and the edges of dynamic scaling."""
    qwen = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    deepseek = {"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.3}
    dynamic = {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    return {
        "qwen2.5": RopeCase(_rope(128, 1e6, max_position_embeddings=32768, rope_scaling=qwen), 131072),
        "qwen3": RopeCase(
            _rope(128, 1e6, max_position_embeddings=40960, rope_scaling=qwen | {"attention_factor": 1.25}), 131072
        ),
        "deepseek": RopeCase(
            _rope(
                64,
                1e4,
                max_position_embeddings=163840,
                rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, **deepseek},
            ),
            163840,
        ),
        "gpt-oss": RopeCase(
            _rope(
                64,
                1.5e5,
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1.5e5,
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                    "truncate": False,
                },
            ),
            131072,
        ),
        "internlm2": RopeCase(_rope(128, 1e6, **dynamic), 65536),
        "internlm2, one token more": RopeCase(_rope(128, 1e6, **dynamic), 32769),
        "internlm2, short": RopeCase(_rope(128, 1e6, **dynamic), 2000),
    }


def exact_weights(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights from integers, the same on every processor. Q and K are large enough that attention is not flat;
    weights of norms are around 1."""
    generator = torch.Generator().manual_seed(len(raw["architectures"][0]))
    weights = {}
    for name, shape in sorted(expected_tensors(describe(raw)).items()):
        values = torch.randint(-1024, 1025, shape, generator=generator) / 1024
        if name.endswith("norm.weight"):
            weights[name] = 1 + values / 2
        elif len(shape) == 1:
            weights[name] = values
        else:
            gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            weights[name] = values * (gain * (3 / shape[1]) ** 0.5)
    return weights


def _raw(family: str, **changes: Any) -> dict[str, Any]:
    raw = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    raw |= changes
    return {name: value for name, value in raw.items() if value is not None or name == "sliding_window"}


def _rope(head_dim: int, theta: float, **changes: Any) -> dict[str, Any]:
    return _raw("Llama", hidden_size=2 * head_dim, num_attention_heads=2, rope_theta=theta, **changes)
