"""The demo model as a whole folder in Hugging Face layout: images hold no model.

python -m tests.docker.model FOLDER
"""

import json
import sys
from pathlib import Path

import torch

from engine.model.checkpoint import open_checkpoint
from engine.model.demo_checkpoint import DEMO_NAME
from tests.bench.export import export_demo


def write_demo_folder(folder: Path) -> Path:
    """Weights in bfloat16; readable for all, as a mounted folder should be."""
    export_demo(folder, torch.bfloat16)
    tokenizer = open_checkpoint(DEMO_NAME).tokenizer()
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    template = tokenizer.chat_template
    assert template
    (folder / "chat_template.jinja").write_text(template.source)
    (folder / "tokenizer_config.json").write_text(json.dumps(template.tokens))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


if __name__ == "__main__":
    write_demo_folder(Path(sys.argv[1]))
