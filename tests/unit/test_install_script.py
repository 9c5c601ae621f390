"""docker/install.sh in a copy of its folder, with a program in Docker's place that writes down how it was called."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from server.keys import KeyFile

DOCKER = Path(__file__).parents[2] / "docker"
STUB = '#!/bin/sh\necho "$@" >>"$CALLS"\ncase "$*" in "image inspect "*-gpu) exit 1 ;; esac\n'


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """As docker/bundle.sh lays it out, with one model and an image that is none."""
    folder = tmp_path / "quire 1.2.3-rc1"
    (folder / "images").mkdir(parents=True)
    for name in ("install.sh", ".env.example", "compose.yaml"):
        shutil.copy(DOCKER / name, folder)
    (folder / "images/quire-1.2.3-rc1-cpu.tar.gz").write_bytes(b"image")
    (folder / "models/tiny & co").mkdir(parents=True)
    (folder / "models/tiny & co/config.json").write_text("{}")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    sums = (f"{hashlib.sha256((folder / file).read_bytes()).hexdigest()}  {file}\n" for file in files)
    (folder / "SHA256SUMS").write_text("".join(sums))
    return folder


def install(folder: Path, *arguments: str, has_docker: bool = True) -> subprocess.CompletedProcess[str]:
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "docker").write_text(STUB if has_docker else "#!/bin/sh\nexit 1\n")
    (programs / "docker").chmod(0o755)
    environ = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(folder.parent / "calls")}
    environ.pop("DOCKER", None)
    return subprocess.run([folder / "install.sh", *arguments], env=environ, capture_output=True, text=True, timeout=30)


def variables(folder: Path) -> dict[str, str]:
    return dict(re.findall(r"^([A-Z_]+)=(.*)$", (folder / ".env").read_text(), re.MULTILINE))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_bundle_becomes_a_service(bundle: Path) -> None:
    done = install(bundle)
    assert done.returncode == 0, done.stderr
    assert "load --input images/quire-1.2.3-rc1-cpu.tar.gz" in (bundle.parent / "calls").read_text()
    found = variables(bundle)
    assert (found["MODEL"], found["VERSION"], found["COMPOSE_PROJECT_NAME"]) == ("tiny & co", "1.2.3-rc1", "quire")
    assert found.get("RUN_AS") == (None if os.geteuid() == 0 else str(os.geteuid()))
    key = re.search(r"sk-[0-9a-f]{48}", done.stdout)
    assert key and "--profile cpu up -d" in done.stdout
    secrets = bundle / "secrets"
    keys = KeyFile(secrets / "api_keys")
    assert keys.tenant(f"Bearer {key[0]}").name == "default"
    assert keys.tenant(f"Bearer {(secrets / 'metrics_key').read_text()}").name == "metrics"
    assert key[0] not in (secrets / "api_keys").read_text()
    # The group is the server's, and for others the folder is closed; in it, files that other containers read.
    assert mode(secrets) == 0o750 and mode(secrets / "api_keys") == 0o640
    assert mode(secrets / "metrics_key") == mode(secrets / "grafana_password") == 0o644


def test_a_checkout_is_told_which_image_it_has(bundle: Path) -> None:
    shutil.rmtree(bundle / "images")
    (bundle / "SHA256SUMS").unlink()
    said = install(bundle).stdout
    version = re.search(r"quire:\$\{VERSION:-([\d.]+)\}-gpu", (DOCKER / "compose.yaml").read_text())
    assert version and "--profile cpu up -d" in said and "--profile gpu" not in said
    assert f"there is no image quire:{version[1]}-gpu" in said and "make docker TARGET=gpu" in said


def test_an_upgrade_keeps_settings_and_keys(bundle: Path) -> None:
    (bundle / ".env").write_text("MODEL=mine\nVERSION=0.9.0\nHTTP_PORT=9000\n")
    (bundle / "secrets").mkdir()
    (bundle / "secrets/api_keys").write_text("mine 0123456789abcdef\n")
    done = install(bundle)
    assert done.returncode == 0, done.stderr
    assert (bundle / ".env").read_text() == "MODEL=mine\nVERSION=1.2.3-rc1\nHTTP_PORT=9000\n"
    assert (bundle / "secrets/api_keys").read_text() == "mine 0123456789abcdef\n" and "sk-" not in done.stdout


@pytest.mark.parametrize(
    ("file", "text"), [("compose.yaml", "other"), ("models/tiny & co/config.json", None), ("SHA256SUMS", "no sums\n")]
)
def test_damage_in_transit_is_told_before_anything_is_done(bundle: Path, file: str, text: str | None) -> None:
    if text is None:
        (bundle / file).unlink()
    else:
        (bundle / file).write_text(text)
    done = install(bundle)
    assert done.returncode == 2 and "install.sh: files are missing or differ from SHA256SUMS" in done.stderr
    assert not (bundle / ".env").exists() and not (bundle.parent / "calls").exists()


def test_what_is_missing_is_one_line(bundle: Path) -> None:
    done = install(bundle, has_docker=False)
    assert done.returncode == 2 and done.stderr.startswith("install.sh: no Docker engine answers")
    done = install(bundle, "other")
    assert done.returncode == 2 and done.stderr.startswith("install.sh: models/other has no config.json")
    shutil.rmtree(bundle / "models/tiny & co")
    (bundle / "SHA256SUMS").unlink()
    done = install(bundle)
    assert done.returncode == 2 and done.stderr.startswith("install.sh: models/ holds no model")
    (bundle / "models/first").mkdir()
    (bundle / "models/second").mkdir()
    done = install(bundle)
    assert done.returncode == 2 and done.stderr.startswith("install.sh: models/ holds 2 folders; name one of them")
    assert done.stderr.count("\n") == 1 and not (bundle / ".env").exists()
