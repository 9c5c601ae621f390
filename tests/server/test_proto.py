"""The generated code beside the contract is what the contract generates."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTO = "proto/quire/v1/inference.proto"


def test_generated_code_is_current(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, PROTO], cwd=ROOT, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(generated) == 3
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale: run `make proto`"
