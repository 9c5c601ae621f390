"""Prompts from a file: JSON lines, or a JSON list as ShareGPT's."""

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from server.bench.endpoints import Prompt

MAX_TOKENS = 2**31 - 1


class Dataset:
    """Prompts in the order of the file, from its start again behind its end. Each level goes on behind the last."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompts = cycle(prompts)

    async def take(self, level: int, num_prompts: int) -> list[Prompt]:
        return list(islice(self._prompts, num_prompts))


def read_dataset(path: str, *, max_tokens: int, takes_messages: bool) -> tuple[Prompt, ...]:
    """Raises StartupError that names the line and what it must hold, and repeats nothing of it."""
    prompts = []
    for where, item in _items(path):
        if not isinstance(item, dict):
            raise StartupError(f"{where}: it must be a JSON object with prompt or messages")
        content = _content(item)
        if content is None:
            raise StartupError(
                f"{where}: it must have prompt, a string, messages, a list of objects, or conversations as in ShareGPT"
            )
        if not takes_messages and not isinstance(content, str):
            raise StartupError(f"{where}: it has messages; they need --endpoint chat, over HTTP")
        length = item.get("max_tokens", max_tokens)
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_TOKENS:
            raise StartupError(f"{where}: max_tokens must be a whole number from 1 to {MAX_TOKENS}")
        prompts.append(Prompt(content, length))
    if not prompts:
        raise StartupError(f"--dataset {path}: there is no prompt in it")
    return tuple(prompts)


def _items(path: str) -> list[tuple[str, Any]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--dataset {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise StartupError(f"--dataset {path}: it is not UTF-8") from None
    if text.lstrip().startswith("["):
        listed = _parse(text, f"--dataset {path}")
        return [(f"--dataset {path}, item {number}", item) for number, item in enumerate(listed, 1)]
    lines = [(f"--dataset {path}, line {number}", line) for number, line in enumerate(text.split("\n"), 1)]
    return [(where, _parse(line, where)) for where, line in lines if line.strip()]


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise StartupError(f"{where}: it is not valid JSON") from None


def _content(item: dict[str, Any]) -> str | tuple[dict[str, Any], ...] | None:
    """A string `prompt`, `messages`, or the first turn of ShareGPT's `conversations`."""
    match item:
        case {"prompt": str(prompt)} if prompt:
            return prompt
        case {"messages": [*messages]} if messages and all(isinstance(message, dict) for message in messages):
            return tuple(messages)
        case {"conversations": [{"value": str(value)}, *_]} if value:
            return value
    return None
