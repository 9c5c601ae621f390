"""A checkpoint in a folder with Hugging Face's layout: config.json, *.safetensors, tokenizer.json."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import StartupError
from engine.model.describe import describe, eos_token_ids, sampling_defaults
from engine.model.folder import INDEX, is_there, no_entry, read_index, read_json_object, read_tokenizer
from engine.tokenizer import Tokenizer

DTYPES = ("F32", "BF16", "F16")
HEADER_LIMIT = 100_000_000


class FolderCheckpoint:
    """Opens every safetensors file (memory-mapped) and reads headers only. Raises StartupError as `Checkpoint` says.
    Without a `name`, clients call the model by the folder's."""

    def __init__(self, folder: Path, name: str | None = None):
        self.name = name or Path(os.path.abspath(folder)).name
        self._folder = folder
        config = describe(read_json_object(folder / "config.json"))
        generation = read_json_object(folder / "generation_config.json", optional=True)
        extra = eos_token_ids(generation.get("eos_token_id"), config.vocab_size, "generation_config.json")
        self.config = replace(config, eos_token_ids=config.eos_token_ids | extra)
        self.sampling_defaults = sampling_defaults(generation, "generation_config.json")

        self._files: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        for file, indexed in _weight_files(folder).items():
            handle = _open(folder / file)
            self._handles[file] = handle
            present = handle.keys()
            if indexed is not None and (absent := indexed.difference(present)):
                raise StartupError(f"{folder / file}: tensor {min(absent)} is missing, {INDEX} says that it is here")
            for name in indexed or present:
                if name in self._files:
                    raise StartupError(f"{folder}: tensor {name} is in both {self._files[name]} and {file}")
                self._files[name] = file

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[self._files[name]].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Also raises StartupError if the weight is stored in a type that is not supported."""
        if name not in self._files:
            return None
        header = self._handles[self._files[name]].get_slice(name)
        if header.get_dtype() not in DTYPES:
            raise StartupError(
                f"{self.file(name)}: tensor {name} is stored as {header.get_dtype()}, expected {', '.join(DTYPES)}"
            )
        return tuple(header.get_shape())

    def file(self, name: str) -> str:
        if name in self._files:
            return str(self._folder / self._files[name])
        if len(self._handles) == 1:
            return str(self._folder / next(iter(self._handles)))
        return str(self._folder)

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self._folder)


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """The files to open, each with the tensors that the index places in it (None without an index)."""
    if is_there(folder / INDEX):
        return _indexed_files(folder)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if "model.safetensors" in files:
        return {"model.safetensors": None}
    if files:
        return dict.fromkeys(files)
    try:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    except PermissionError as error:
        raise no_entry(folder) from error
    if pickles:
        raise StartupError(
            f"{folder / pickles[0]}: pickled weights are refused because loading a pickle runs code from the file; "
            "expected *.safetensors"
        )
    raise StartupError(f"{folder}: no weights found, expected model.safetensors or {INDEX} with the files it names")


def _indexed_files(folder: Path) -> dict[str, set[str] | None]:
    files: dict[str, set[str] | None] = {}
    for file, names in read_index(folder).items():
        if not is_there(folder / file):
            raise StartupError(f"{folder / file}: file is missing, {INDEX} says that it holds {len(names)} tensors")
        files[file] = names
    return files


def _open(path: Path) -> Any:
    """Map the file and read its header, which the library also checks against the file's size."""
    num_bytes = path.stat().st_size if is_there(path) else 0
    try:
        promised = _promised_bytes(path)
        if promised is not None and num_bytes < promised:
            raise StartupError(f"{path}: file is truncated, has {num_bytes} bytes, its header expects {promised}")
        return safe_open(path, framework="pt")
    except PermissionError as error:
        raise no_entry(path) from error
    except (SafetensorError, OSError) as error:
        raise StartupError(
            f"{path}: not readable as safetensors ({error}), expected a complete file; it has {num_bytes} bytes"
        ) from error


def _promised_bytes(path: Path) -> int | None:
    """The size that the header calls for; None if there is no header to believe."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > HEADER_LIMIT:
            return None
        try:
            header = json.loads(file.read(header_bytes))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            return 8 + header_bytes + max(ends, default=0)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
