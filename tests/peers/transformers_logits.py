"""Logits and rotary frequencies by Hugging Face transformers, as JSON. Runs in transformers' environment.

python transformers_logits.py < {"models": [{"folder", "tokens", "positions"}], "ropes": [{"raw", "length"}]}
"""

import json
import sys
from typing import Any

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


def logits(folder: str, tokens: list[int], positions: list[int]) -> list[list[float]]:
    """fp32 [positions, vocab] of one forward pass over all tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        rows: list[list[float]] = model(torch.tensor([tokens])).logits[0, positions].tolist()
    return rows


def rope(raw: dict[str, Any], length: int) -> dict[str, Any]:
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))
    rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    return {"frequencies": rotary.inv_freq.tolist(), "scale": rotary.attention_scaling}


def main() -> None:
    cases = json.load(sys.stdin)
    result = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "models": [logits(**case) for case in cases["models"]],
        "ropes": [rope(**case) for case in cases["ropes"]],
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
