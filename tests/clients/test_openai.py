"""openai-python in the versions that people have: one program, run by each in an environment of its own."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from engine.model.demo_checkpoint import DEMO_NAME
from tests.clients.environments import Environments, run
from tests.e2e.servers import SMALL, Server, Start

pytestmark = pytest.mark.clients
PROGRAM = Path(__file__).parent / "openai_program"
REQUIREMENTS = {"1.109": "openai>=1.109,<1.110", "2": "openai>=2,<3", "3": "openai>=3,<4"}
KEY = "key-of-a-test-0123456789"


def checks() -> list[str]:
    """The names of the program's checks; importing them would need openai."""
    nodes = [node for file in sorted(PROGRAM.glob("*.py")) for node in ast.walk(ast.parse(file.read_text()))]
    return [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


@pytest.fixture(scope="session")
def strict(start: Start, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"tester {KEY}\n")
    options = ("--api-keys", str(keys), "--max-num-seqs", "1", "--max-queued-requests", "1")
    return start(str(model_folder), *SMALL, *options).wait_ready()


@pytest.fixture(scope="module", params=REQUIREMENTS)
def outcomes(
    request: pytest.FixtureRequest,
    environments: Environments,
    server: Server,
    strict: Server,
    start: Start,
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    version = request.param
    python = environments.python(f"openai-{version}", REQUIREMENTS[version])
    doomed = [start(str(model_folder), *SMALL, "--drain-seconds", "0") for _ in range(2)]
    ends = [(f"{one.wait_ready().http}/v1", one.popen.pid) for one in doomed]
    settings = {
        "answers": {"url": f"{server.http}/v1", "model": DEMO_NAME},
        "failures": {"url": f"{strict.http}/v1", "key": KEY, "model": model_folder.name, "doomed": ends},
    }
    outcomes: dict[str, Any] = json.loads(
        run(python, PROGRAM, json.dumps(settings), cwd=tmp_path_factory.mktemp("empty"))
    )
    assert outcomes["version"].startswith(f"{version}."), outcomes["version"]
    return outcomes


@pytest.mark.parametrize("check", checks())
def test_openai(outcomes: dict[str, Any], check: str) -> None:
    assert outcomes["checks"][check] is None, f"{outcomes['version']}: {outcomes['checks'][check]}"
