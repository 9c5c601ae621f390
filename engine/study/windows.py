"""The text of a study: read, tokenized, cut into windows. No torch."""

from collections.abc import Sequence
from pathlib import Path

from engine.errors import StartupError
from engine.tokenizer import Tokenizer

Tokens = tuple[int, ...]


def read_text(path: str) -> str:
    """The UTF-8 text of a file. Raises StartupError where it cannot be read, is not text or is empty."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise StartupError(f"--text {path}: {error.strerror or error}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise StartupError(f"--text {path}: not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    if not text.strip():
        raise StartupError(f"--text {path}: the file is empty; it must hold at least one context of text")
    return text


def tokenize(text: str, tokenizer: Tokenizer, context: int, path: str) -> Tokens:
    """Ids of `text`, without what the tokenizer puts around a prompt: windows begin in the middle of a text. Raises
    StartupError where they are fewer than `context`."""
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False, param="--text"))
    if len(tokens) < context:
        raise StartupError(
            f"--text {path}: {len(tokens)} tokens, shorter than one window; lower --context (it is {context}) or give "
            "more text"
        )
    return tokens


def cut_windows(tokens: Sequence[int], context: int, most: int) -> tuple[Tokens, ...]:
    """The first `most` windows of `context` tokens, one behind the other; fewer where the text ends before."""
    count = min(most, len(tokens) // context)
    return tuple(tuple(tokens[index * context : (index + 1) * context]) for index in range(count))
