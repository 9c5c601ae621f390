from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Start, servers, write_lively_model


@pytest.fixture
def start() -> Iterator[Start]:
    with servers() as start:
        yield start


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("models") / "lively")
