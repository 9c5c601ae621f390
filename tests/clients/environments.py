"""Virtual environments for clients, without this project in them."""

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER_VARIABLE = "QUIRE_CLIENTS_DIR"


@dataclass(frozen=True)
class Environments:
    """Made when asked for, and kept in `folder`: delete it to have newer versions."""

    folder: Path

    def python(self, name: str, *requirements: str) -> Path:
        """An interpreter with `requirements` and what those need. Skips the test where pip cannot install them."""
        home = self.folder / f"{name}-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:8]}"
        python, done = home / "bin" / "python", home / "installed"
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
            result = subprocess.run(pip, capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"pip cannot install {' '.join(requirements)}: {result.stderr.strip().splitlines()[-1]}")
            done.touch()
        return python


def run(python: Path, *arguments: str | Path, cwd: Path, **variables: str) -> str:
    """What a client printed. It sees neither this project nor the tester's settings, and must end well."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OPENAI", "HF_"))}
    result = subprocess.run(
        [python, *arguments], capture_output=True, text=True, cwd=cwd, env=environ | variables, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
