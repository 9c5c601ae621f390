"""What a wrongly set up host or container is told at start: one line that says what to do."""

import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.device import choose_device
from engine.errors import StartupError
from engine.model.checkpoint import open_checkpoint
from engine.triton_needs import check_triton_needs
from server.cli import main
from tests.model_folders import write_model_folder
from tests.rights import NOBODY, shared_folder, without_rights


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as path:
        yield path


def one_line(check: Callable[[], object]) -> str:
    with pytest.raises(StartupError) as caught:
        check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model", ["/nowhere/llama", "./llama", "../llama"])
def test_a_model_folder_that_is_not_mounted(model: str) -> None:
    says = one_line(lambda: open_checkpoint(model))
    assert repr(model) in says and "no such folder" in says and "mounted" in says


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_file_of_another_owner(folder: Path, name: str) -> None:
    for path in write_model_folder(folder / "model").iterdir():
        path.chmod(0 if path.name == name else 0o644)  # safetensors writes for the owner alone
    with without_rights() as user:
        says = one_line(lambda: open_checkpoint(str(folder / "model")).tokenizer())
    assert f"{folder}/model/{name}: user {user} may not read it" in says and "chmod -R a+rX" in says


@pytest.mark.parametrize(("mode", "file"), [(0o000, "config.json"), (0o711, "")])
def test_a_model_folder_of_another_owner(folder: Path, mode: int, file: str) -> None:
    write_model_folder(folder / "model")
    (folder / "model").chmod(mode)
    with without_rights() as user:
        says = one_line(lambda: open_checkpoint(str(folder / "model")))
    assert f"{folder / 'model' / file}: user {user} may not read it" in says


@pytest.mark.parametrize("exists", [True, False])
def test_a_cache_volume_of_another_owner(folder: Path, exists: bool, capsys: pytest.CaptureFixture[str]) -> None:
    cache = folder / "cache"
    if exists:
        cache.mkdir(mode=0o500)
    with without_rights() as user:
        assert main(["serve", "m"], {"TMPDIR": str(cache)}) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"quire: TMPDIR is {cache}, where user {user} with group") and error.count("\n") == 1


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_driver() -> bool:
        warnings.warn("CUDA initialization: the driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in one_line(lambda: choose_device("cuda"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "finds no GPU; install NVIDIA's driver" in one_line(lambda: choose_device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert "finds no GPU (CUDA initialization: the driver is too old);" in one_line(lambda: choose_device("cuda"))
    assert caught == []
    with pytest.warns(UserWarning, match="the driver is too old"):
        assert choose_device("auto").type == "cpu"


@pytest.fixture
def complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that Triton needs, and nothing else on the path."""
    (folder / "gcc").write_text("#!/bin/sh\n")
    (folder / "gcc").chmod(0o755)
    (folder / "Python.h").touch()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(folder))
    return folder


def test_triton_has_what_it_needs(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_triton_needs(complete / "cache" / "triton")
    (complete / "gcc").rename(complete / "clang")
    check_triton_needs(complete / "cache" / "triton")
    monkeypatch.setenv("CC", str(complete / "clang"))
    check_triton_needs(complete / "cache" / "triton")
    assert list((complete / "cache" / "triton").iterdir()) == []


def test_triton_without_compiler_headers_or_cache(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (complete / "Python.h").unlink()
    assert "Python.h" in one_line(lambda: check_triton_needs(complete))
    (complete / "Python.h").touch()
    with without_rights() as user:
        says = one_line(lambda: check_triton_needs(Path("/proc/triton") if user != NOBODY else complete / "cache"))
    assert "TRITON_CACHE_DIR" in says and f"user {user}" in says
    monkeypatch.setenv("CC", "no-such-cc")
    assert "there is no no-such-cc" in one_line(lambda: check_triton_needs(complete))
    monkeypatch.delenv("CC")
    (complete / "gcc").unlink()
    assert "there is no gcc" in one_line(lambda: check_triton_needs(complete))
