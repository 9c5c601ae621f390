"""The JSON files and the tokenizer of a model folder."""

import json
import os
from collections import defaultdict
from pathlib import Path, PurePath
from typing import Any

import tokenizers

from engine.chat_template import ChatTemplate
from engine.errors import StartupError
from engine.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"


def read_json_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is optional and absent. Raises StartupError."""
    if optional and not is_there(path):
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: not readable as JSON ({error}), expected a JSON object") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: holds a JSON {type(value).__name__}, expected a JSON object")
    return value


def is_there(path: Path) -> bool:
    """Whether a folder has this file. Raises StartupError for a link that leads nowhere: whoever copied or mounted the
    folder left behind what it leads to, and without it the file would count as one that nobody wanted to be there."""
    try:
        if path.exists():
            return True
    except PermissionError as error:
        raise no_entry(path) from error
    if path.is_symlink():
        raise StartupError(
            f"{path}: is a link that leads nowhere ({os.readlink(path)}); copy the folder with cp -rL, or mount all of "
            "the folder that its links lead into"
        )
    return False


def read_text(path: Path) -> str:
    if not is_there(path):
        raise StartupError(
            f"{path}: file is missing, expected a folder with config.json, *.safetensors and tokenizer.json"
        )
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError as error:
        raise no_entry(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: cannot be read ({error}), expected UTF-8 text") from error


def no_entry(path: Path) -> StartupError:
    return StartupError(
        f"{path}: user {os.geteuid()} may not read it; let others read the folder (chmod -R a+rX), or run as its owner"
    )


def read_index(folder: Path) -> dict[str, set[str]]:
    """The files that a folder's index names, in order, each with the tensors it places there. Raises StartupError."""
    path = folder / INDEX
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise StartupError(f"{path}: weight_map is missing or not an object of tensor and file names")
    by_file: defaultdict[str, set[str]] = defaultdict(set)
    for name, file in weight_map.items():
        by_file[file].add(name)
    for file in sorted(by_file):
        # Compared as written: inside the folder a link may lead elsewhere, as in the Hugging Face cache.
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts or PurePath(file).suffix != ".safetensors":
            raise StartupError(f"{path}: weight_map names {file!r}, expected a .safetensors file inside the folder")
    return dict(sorted(by_file.items()))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder, with its chat template if there is one. Raises StartupError."""
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_str(read_text(path))
    except StartupError:
        raise
    except Exception as error:
        # The library raises bare Exception for whatever it cannot parse.
        raise StartupError(f"{path}: not a readable tokenizer ({error}), expected the tokenizers format") from error
    config = read_json_object(folder / "tokenizer_config.json", optional=True)
    source = _template_source(folder, config)
    template = ChatTemplate(source, _special_tokens(config)) if source is not None else None
    return Tokenizer(backend, template)


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """A template lies in one of three places; the later ones are older and lose."""
    if is_there(folder / "chat_template.jinja"):
        return read_text(folder / "chat_template.jinja")
    path = folder / "chat_template.json"
    if is_there(path):
        return _default_template(read_json_object(path).get("chat_template"), path)
    return _default_template(config.get("chat_template"), folder / "tokenizer_config.json")


def _default_template(value: Any, path: Path) -> str | None:
    if value is None or isinstance(value, str):
        return value
    templates = value if isinstance(value, list) else []
    named = {item["name"]: item.get("template") for item in templates if isinstance(item, dict) and "name" in item}
    if not isinstance(named.get("default"), str):
        raise StartupError(f"{path}: chat_template has no template named default, expected text or a list with one")
    return str(named["default"])


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens
