import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.model.demo_checkpoint import DEMO_NAME
from tests.clients.environments import FOLDER_VARIABLE, Environments
from tests.e2e.servers import PORTS, Server, Start, servers, write_lively_model


@pytest.fixture(scope="session")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Environments:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Environments(Path(folder).absolute() if folder else tmp_path_factory.mktemp("environments"))


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def server(start: Start) -> Server:
    """The demo model, as `make serve` serves it."""
    options = ("--device", "cpu", "--max-model-len", "1024", "--max-num-seqs", "4")
    return start(DEMO_NAME, "--kv-format", "int4", *options, *PORTS).wait_ready()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("models") / "lively")
