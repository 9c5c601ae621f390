"""Rewrite what transformers made of tests/data: `python -m tests.peers.regenerate PYTHON_WITH_TRANSFORMERS`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME, demo_file
from tests.peers import model_logits

DATA = Path(__file__).parent.parent / "data" / "greedy"
NUM_TOKENS = 64


def continuations(python: str) -> dict[str, Any]:
    """What transformers makes of the stored prompts, with the ids of our tokenizer."""
    tokenizer = open_checkpoint(DEMO_NAME).tokenizer()
    prompts = [tokenizer.encode(text) for text in json.loads((DATA / "prompts.json").read_text())]
    script = Path(__file__).parent / "transformers_greedy.py"
    command = [python, str(script), str(demo_file()), str(NUM_TOKENS)]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    for prompt, continuation in zip(prompts, result["continuations"], strict=True):
        continuation["prompt"] = prompt
    return result


if __name__ == "__main__":
    (DATA / "expected.json").write_text(json.dumps(continuations(sys.argv[1])) + "\n")
    model_logits.write(sys.argv[1])
