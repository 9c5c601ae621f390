"""docker/bundle.sh with programs in the place of Docker and syft: what is in the archive, what is refused at once."""

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NAME = f"quire-{VERSION}-cpu"
DOCKER = """#!/bin/sh
case "$*" in
    *prom/*|*grafana/*) exit 1 ;;
    save*) echo save >>"$CALLS"; echo image ;;
esac
"""
SYFT = '#!/bin/sh\nfor word in "$@"; do case "$word" in spdx-json=*) echo "{}" >"${word#*=}" ;; esac; done\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "blobs/tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that go before others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    put(folder / "docker", DOCKER)
    put(folder / "syft", SYFT)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("DOCKER", raising=False)
    monkeypatch.delenv("SYFT", raising=False)
    return folder


def put(program: Path, text: str) -> None:
    program.write_text(text)
    program.chmod(0o755)


def pack(model: Path | str, out: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """With an umask that keeps others out."""
    command = [ROOT / "docker/bundle.sh", model, "cpu", out]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, umask=0o077)


def refused(says: str, model: Path | str, out: Path, cwd: Path = ROOT) -> None:
    done = pack(model, out, cwd)
    assert done.returncode == 2 and re.fullmatch(f"bundle.sh: {says}\n", done.stderr), done.stderr
    assert not Path(os.environ["CALLS"]).exists()


def test_others_can_read_everything_in_the_archive(model: Path, tmp_path: Path) -> None:
    """Containers run as other users than the one who unpacks, so each folder must be there with its mode."""
    out = tmp_path / "dist"
    done = pack(model, out)
    assert done.returncode == 0, done.stderr
    with tarfile.open(out / f"{NAME}.tar") as archive:
        members = {member.name: member for member in archive.getmembers()}
    assert {f"{NAME}/models/tiny/model.safetensors", f"{NAME}/prometheus/alerts.yml"} <= members.keys()
    parents = {str(parent) for name in members for parent in Path(name).parents} - {"."}
    assert parents <= {name for name, member in members.items() if member.isdir() and member.mode & 0o777 == 0o755}
    assert all(member.mode & 0o444 == 0o444 and (member.uid, member.gid) == (0, 0) for member in members.values())
    subprocess.run(["tar", "-xf", out / f"{NAME}.tar", "-C", tmp_path], check=True)
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=tmp_path / NAME, check=True)


def test_a_model_keeps_the_name_that_was_given(model: Path, tmp_path: Path) -> None:
    (tmp_path / "nice").symlink_to(model)
    assert pack("nice", tmp_path / "dist", tmp_path).returncode == 0
    assert pack(".", tmp_path / "other", model).returncode == 0
    for out, name in (("dist", "nice"), ("other", "tiny")):
        with tarfile.open(tmp_path / out / f"{NAME}.tar") as archive:
            assert archive.getmember(f"{NAME}/models/{name}/config.json").isreg()


@pytest.mark.parametrize(
    ("link", "target"), [("tokenizer.json", "nowhere"), ("loop", "loop"), ("up", ".."), ("far", "{far}")]
)
def test_links_that_lead_nowhere_are_told_before_the_work(model: Path, tmp_path: Path, link: str, target: str) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far/back").symlink_to(model)
    (model / link).symlink_to(target.format(far=tmp_path / "far"))
    refused(rf"the model has a link that leads nowhere, .*/{link}.*", model, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("out", ["", "deep/dist", "linked/dist"])
def test_the_archive_does_not_go_into_the_model(model: Path, tmp_path: Path, out: str) -> None:
    (tmp_path / "outside").mkdir()
    (model / "linked").symlink_to(tmp_path / "outside")
    refused(r".* is in the model, .*; name another folder", ".", model / out, model)
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "linked", "model.safetensors"]


def test_what_fails_last_leaves_no_checksum_that_is_wrong(model: Path, tmp_path: Path, programs: Path) -> None:
    out = tmp_path / "dist"
    assert pack(model, out).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert before.keys() == {f"{NAME}.tar", f"{NAME}.tar.sha256"}
    (model / "model.safetensors").write_bytes(bytes(2000))
    real = shutil.which("sha256sum")
    put(programs / "sha256sum", f'#!/bin/sh\ncase "$1" in *.tar) exit 1 ;; esac\nexec {real} "$@"\n')
    assert pack(model, out).returncode == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (programs / "sha256sum").unlink()
    real = shutil.which("mv")
    put(programs / "mv", f'#!/bin/sh\ncase "$*" in *.tar*) exit 1 ;; esac\nexec {real} "$@"\n')
    assert pack(model, out).returncode == 1
    assert [path.name for path in out.iterdir()] == [f"{NAME}.tar"]
