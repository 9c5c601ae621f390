"""The contract: its generated code is current, its style is buf's, and its users' messages still mean the same."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = "proto/quire/v1/inference.proto"


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("buf")), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_generated_code_is_current(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "."]
    command += [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, PROTO], cwd=ROOT, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*"))
    assert len(generated) == 3
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale: run `make proto`"


def test_it_follows_the_standard_style() -> None:
    result = buf("lint", "proto")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_nothing_that_was_released_has_changed() -> None:
    result = buf("breaking", "proto", "--against", "proto/released.binpb")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("string model = 1;", "string model = 31;"),
        ("rpc GetModel(", "rpc FetchModel("),
        ("  FINISH_REASON_STOP = 1;", ""),
    ],
)
def test_a_change_that_breaks_clients_is_seen(tmp_path: Path, old: str, new: str) -> None:
    shutil.copytree(ROOT / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    path = tmp_path / PROTO
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    result = buf("breaking", str(tmp_path / "proto"), "--against", "proto/released.binpb")
    assert result.returncode == 100 and "inference.proto" in result.stdout
