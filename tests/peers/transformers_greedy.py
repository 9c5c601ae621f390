"""Greedy continuations by Hugging Face transformers, as JSON on standard output. Runs in transformers' environment.

python transformers_greedy.py MODEL.gguf NUM_TOKENS < prompts as lists of token ids, JSON
"""

import json
import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    path, num_tokens = Path(sys.argv[1]), int(sys.argv[2])
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    continuations = []
    for prompt in json.load(sys.stdin):
        tokens: list[int] = []
        gaps: list[float] = []
        past, ids = None, torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(num_tokens):
                output = model(ids, past_key_values=past, use_cache=True)
                past = output.past_key_values
                best = output.logits[0, -1].topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(round(float(best.values[0] - best.values[1]), 6))
                ids = best.indices[:1].unsqueeze(0)
        continuations.append({"tokens": tokens, "gaps": gaps})
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    json.dump({"versions": versions, "continuations": continuations}, sys.stdout)


if __name__ == "__main__":
    main()
