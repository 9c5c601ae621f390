"""What transformers makes of the cases in model_cases.py; kept in tests/data/models/expected.json."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.peers.model_cases import model_cases, rope_cases

EXPECTED = Path(__file__).parent.parent / "data" / "models" / "expected.json"


def computed(python: str) -> dict[str, Any]:
    """`versions`; `models`: logits by case; `ropes`: frequencies and scale by case."""
    models, ropes = model_cases(), rope_cases()
    with TemporaryDirectory() as folder:
        asked = {
            "models": [
                {
                    "folder": str(case.write(Path(folder, str(number)))),
                    "tokens": case.tokens,
                    "positions": case.positions,
                }
                for number, case in enumerate(models.values())
            ],
            "ropes": [asdict(case) for case in ropes.values()],
        }
        script = Path(__file__).parent / "transformers_logits.py"
        done = subprocess.run(
            [python, str(script)], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
    result: dict[str, Any] = json.loads(done.stdout)
    for name, cases in (("models", models), ("ropes", ropes)):
        result[name] = dict(zip(cases, result[name], strict=True))
    return result


def write(python: str) -> None:
    EXPECTED.parent.mkdir(exist_ok=True)
    result = computed(python)
    lines = [
        f'"{name}": {{\n'
        + ",\n".join(f"{json.dumps(case)}: {json.dumps(value)}" for case, value in cases.items())
        + "\n}"
        for name, cases in result.items()
    ]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
