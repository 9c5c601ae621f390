"""docker/install.sh in a copy of its folder, with a program in Docker's place that writes down how it was called."""

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from server.keys import KeyFile
from tests.rights import NOBODY, shared_folder

DOCKER = Path(__file__).parents[2] / "docker"
SCRIPT = (DOCKER / "install.sh").read_text()
(PROGRAMS,) = (match.split() for match in re.findall(r"^for program in (.*); do$", SCRIPT, re.MULTILINE))
SECRETS = ("api_keys", "metrics_key", "grafana_password")
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


def install(
    folder: Path,
    *arguments: str,
    has_docker: bool = True,
    path: str = "",
    file_bytes: int | None = None,
    user: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """`path`: where other programs are; `file_bytes`: no file may become larger, as on a full disk; `user`: who runs
    it, None for whoever runs the tests."""
    programs = folder.parent / "bin"
    programs.mkdir(exist_ok=True)
    (programs / "docker").write_text(STUB if has_docker else "#!/bin/sh\nexit 1\n")
    (programs / "docker").chmod(0o755)
    path = path or os.environ["PATH"]
    environ = {**os.environ, "PATH": f"{programs}:{path}", "CALLS": str(folder.parent / "calls"), "LC_ALL": "C"}
    environ.pop("DOCKER", None)

    # programs do what `preexec_fn` and `user=` would: those fork, and gRPC's threads do not always survive that
    before = ["/bin/bash", "-c", "trap '' XFSZ; exec \"$@\"", "bash"]
    if file_bytes is not None:
        before += [shutil.which("prlimit") or "prlimit", f"--fsize={file_bytes}:"]
    if user is not None:
        before += [shutil.which("setpriv") or "setpriv", f"--reuid={user}"]
    command = [*before, "/bin/bash", folder / "install.sh", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)


def refused(folder: Path, says: str, *arguments: str, **how: Any) -> None:
    """One line on stderr, code 2, and no half file."""
    done = install(folder, *arguments, **how)
    assert done.returncode == 2 and re.fullmatch(f"install.sh: {says}\n", done.stderr), done.stderr
    assert "Ready" not in done.stdout and not list(folder.rglob("*.new"))


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
    (bundle / ".env").chmod(0o600)
    (bundle / "secrets").mkdir()
    (bundle / "secrets/api_keys").write_text("mine 0123456789abcdef\n")
    refused(bundle, "models/mine has no config.json; .*")
    (bundle / "models/mine").mkdir()
    (bundle / "models/mine/config.json").write_text("{}")
    done = install(bundle)
    assert done.returncode == 0, done.stderr
    assert (bundle / ".env").read_text() == "MODEL=mine\nVERSION=1.2.3-rc1\nHTTP_PORT=9000\n"
    assert (bundle / "secrets/api_keys").read_text() == "mine 0123456789abcdef\n" and "sk-" not in done.stdout
    assert mode(bundle / ".env") == 0o600


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


def test_it_says_which_programs_are_missing_and_needs_no_others(bundle: Path, tmp_path: Path) -> None:
    for name in PROGRAMS:
        place = shutil.which(name)
        assert place
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(place)
    for name in PROGRAMS:
        (tmp_path / "bin" / name).rename(tmp_path / name)
        refused(bundle, f"these programs are needed and not installed: {name}", path="/nowhere")
        (tmp_path / name).rename(tmp_path / "bin" / name)
    assert sorted(path.name for path in bundle.iterdir()) == [
        ".env.example", "SHA256SUMS", "compose.yaml", "images", "install.sh", "models",
    ]  # fmt: skip
    # The stubs of Docker need a shell.
    (tmp_path / "bin/sh").symlink_to("/bin/sh")
    done = install(bundle, path="/nowhere")
    assert (done.returncode, done.stderr) == (0, "") and all(
        (bundle / "secrets" / name).stat().st_size for name in SECRETS
    )


@pytest.mark.parametrize("file_bytes", [0, 10, 40, 100, 1000])
def test_a_full_disk_leaves_no_half_file(bundle: Path, file_bytes: int) -> None:
    """Whatever could be written before stays, and the next run adds the rest to it."""
    (bundle / ".env").write_text("MODEL=tiny & co\nVERSION=1.2.3-rc1\n")
    if file_bytes > 100:
        (bundle / ".env").unlink()
    (file,) = re.findall(r"(\S+) cannot be written: File too large", install(bundle, file_bytes=file_bytes).stderr)
    there = {name: (bundle / "secrets" / name).read_text() for name in SECRETS if (bundle / "secrets" / name).exists()}
    assert not (bundle / file).exists() and not list(bundle.rglob("*.new"))
    done = install(bundle)
    assert done.returncode == 0 and "The key for clients" in done.stdout and "lacks" not in done.stdout
    assert there.items() <= {name: (bundle / "secrets" / name).read_text() for name in SECRETS}.items()
    metrics = (bundle / "secrets/metrics_key").read_text()
    assert KeyFile(bundle / "secrets/api_keys").tenant(f"Bearer {metrics}").name == "metrics"


def test_a_half_env_is_not_taken_for_one(bundle: Path) -> None:
    for half in ("", "COMPOSE_PROJECT_NAME=quire\nMODEL=\n"):
        (bundle / ".env").write_text(half)
        assert install(bundle).returncode == 0
        assert variables(bundle)["MODEL"] == "tiny & co" and variables(bundle)["COMPOSE_PROJECT_NAME"] == "quire"
    (bundle / "models/second").mkdir()
    (bundle / ".env").write_text("MODEL=\n")
    refused(bundle, "models/ holds 2 folders; name one of them: ./install.sh MODEL")


def test_a_variable_that_was_added_at_the_end_counts(bundle: Path) -> None:
    shutil.copy(bundle / ".env.example", bundle / ".env")
    with (bundle / ".env").open("a") as file:
        file.write('VERSION=0.9.0\nMODEL="tiny & co" # mine\n')
    assert install(bundle).returncode == 0
    lines = (bundle / ".env").read_text().splitlines()
    assert lines[-2:] == ["VERSION=1.2.3-rc1", 'MODEL="tiny & co" # mine'] and "# VERSION=0.1.0" in lines


def test_folders_that_env_names_are_those_that_count(bundle: Path, tmp_path: Path) -> None:
    (bundle / "models").rename(tmp_path / "elsewhere")
    (bundle / "SHA256SUMS").unlink()
    (bundle / ".env").write_text(f"MODELS={tmp_path}/elsewhere\nSECRETS={tmp_path}/keys\n")
    assert install(bundle).returncode == 0 and variables(bundle)["MODEL"] == "tiny & co"
    assert (tmp_path / "keys/api_keys").exists() and not (bundle / "secrets").exists()


def test_secrets_that_are_missing_are_made_and_the_others_left(bundle: Path) -> None:
    secrets = bundle / "secrets"
    secrets.mkdir()
    (secrets / "api_keys").write_text("mine 0123456789abcdef\n")
    said = install(bundle).stdout
    (line,) = re.findall(r"^secrets/api_keys lacks .*: (metrics sha256:.*)$", said, re.MULTILINE)
    assert (secrets / "api_keys").read_text() == "mine 0123456789abcdef\n" and (secrets / "grafana_password").exists()
    with (secrets / "api_keys").open("a") as file:
        file.write(f"{line}\n")
    metrics = (secrets / "metrics_key").read_text()
    assert KeyFile(secrets / "api_keys").tenant(f"Bearer {metrics}").name == "metrics"
    assert "lacks" not in install(bundle).stdout and (secrets / "metrics_key").read_text() == metrics


@pytest.mark.parametrize(
    ("name", "is_folder", "says"),
    [
        (".env", True, r"\.env must be a file; .*"),
        ("secrets", False, "secrets must be a folder; .*"),
        # Compose makes one of a secret that is missing.
        ("secrets/metrics_key", True, "secrets/metrics_key must be a file; .*"),
    ],
)
def test_a_folder_in_the_place_of_a_file(bundle: Path, name: str, is_folder: bool, says: str) -> None:
    (bundle / name).parent.mkdir(exist_ok=True)
    (bundle / name).mkdir() if is_folder else (bundle / name).touch()
    refused(bundle, says)


def test_a_folder_that_may_not_be_written(bundle: Path) -> None:
    with shared_folder() as folder:
        shutil.copytree(bundle, folder / "bundle")
        (folder / "bundle").chmod(0o555)
        refused(folder / "bundle", "user [0-9]+ may not write in .*", user=NOBODY if os.geteuid() == 0 else None)


@pytest.mark.skipif(not Path("/bin/dash").exists(), reason="bash as sh understands it")
def test_another_shell_is_told_to_take_bash(bundle: Path) -> None:
    done = subprocess.run(["/bin/dash", bundle / "install.sh"], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, "install.sh: this needs bash; start it as ./install.sh\n")


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors", "{outside}", "{inside}", "../../../outside"])
def test_weights_that_the_container_would_not_see(bundle: Path, tmp_path: Path, target: str) -> None:
    """Dangling, a loop, and what is there on the host but not below the mounted folder, or not by that path."""
    (tmp_path / "outside").touch()
    (bundle / "models/blob").touch()
    link = bundle / "models/tiny & co/model.safetensors"
    link.symlink_to(target.format(outside=tmp_path / "outside", inside=bundle / "models/blob"))
    refused(bundle, "models/tiny & co/model.safetensors is a link to nothing, .*")
    link.unlink()
    link.symlink_to("../blob")
    assert install(bundle).returncode == 0
