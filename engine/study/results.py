"""The folder of a study: what was measured so far, so that an interrupted run goes on where it stopped."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Size, Tensor

from engine.errors import StartupError

IDENTITY = "study.json"
HIDDEN = "hidden"
MOST_TOLD = 200

T = TypeVar("T")


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all. Raises StartupError where the file cannot be written."""
    _replace(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StartupError(f"{path} cannot be written: {error.strerror or error}") from error


class ResultsFolder:
    """A JSON file for each format, and the hidden states of the reference for each window."""

    def __init__(self, path: Path):
        self._path = path

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> "ResultsFolder":
        """Make the folder, or take up the one that is there. Raises StartupError where it belongs to another study."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(f"{path} cannot be made: {error.strerror or error}") from error
        file = path / IDENTITY
        if not file.exists():
            if any(path.iterdir()):
                raise StartupError(f"{path} holds other files and no results; name a new folder")
            write_json(file, dict(identity))
        found = _read_json(file, dict[str, Any])
        if different := [name for name, value in identity.items() if found.get(name) != value]:
            raise StartupError(
                f"{path} holds results of another run ({', '.join(different)} differ); name another folder or delete it"
            )
        return cls(path)

    def load(self, name: str, kind: type[T]) -> T | None:
        """What was saved under `name`, a dataclass. Raises StartupError where it is damaged."""
        path = self._result(name)
        return _read_json(path, kind) if path.exists() else None

    def save(self, name: str, value: Any) -> None:
        write_json(self._result(name), value)

    def load_reference(self, window: int, shape: Size) -> Tensor:
        """fp32 [tokens, hidden], as saved. Raises StartupError where it is missing, damaged or of another shape."""
        path = self._reference(window)
        try:
            found: Tensor = load(path.read_bytes())[HIDDEN]
        except (OSError, SafetensorError, KeyError) as error:
            raise _damaged(path, error) from error
        if found.dtype != torch.float32 or found.shape != shape:
            raise _damaged(path, f"{found.dtype} {list(found.shape)}; expected torch.float32 {list(shape)}")
        if not found.isfinite().all():
            raise _damaged(path, "numbers that are not finite")
        return found

    def save_reference(self, window: int, hidden: Tensor) -> None:
        _replace(self._reference(window), save({HIDDEN: hidden}))

    def _result(self, name: str) -> Path:
        return self._path / f"format-{name}.json"

    def _reference(self, window: int) -> Path:
        return self._path / f"reference-{window}.safetensors"


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except (OSError, ValueError) as error:
        raise _damaged(path, " ".join(str(error).split())[:MOST_TOLD]) from error


def _damaged(path: Path, why: object) -> StartupError:
    return StartupError(f"{path} cannot be read ({why}); delete the folder and start again")
