import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import CPU_IMAGE, ROOT, Service, docker, has_image, running
from tests.docker.model import write_demo_folder

MODEL = "demo"


@pytest.fixture(scope="session")
def image() -> str:
    assert has_image(CPU_IMAGE), f"there is no image {CPU_IMAGE}; make docker TARGET=cpu builds it"
    return CPU_IMAGE


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model, to be mounted at /models."""
    folder = tmp_path_factory.mktemp("models")
    write_demo_folder(folder / MODEL)
    folder.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def service(image: str, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Installed from the checkout, and started as an operator does it."""
    folder = tmp_path_factory.mktemp("service")
    for name in ("compose.yaml", ".env.example", "install.sh"):
        shutil.copy(ROOT / "docker" / name, folder)
    for name in ("prometheus", "grafana"):
        shutil.copytree(ROOT / "docker" / name, folder / name)
    (folder / "models").symlink_to(models)
    with running(folder) as service:
        yield service


@pytest.fixture
def container(image: str) -> Iterator[str]:
    """A name for one; it is removed with its volumes."""
    name = f"quire-test-{secrets.token_hex(4)}"
    yield name
    docker("rm", "--force", "--volumes", name, check=False)
