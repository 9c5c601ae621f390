"""Prompts as clients write them, and the way to token ids."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.errors import invalid
from engine.tokenizer import Tokenizer
from server.validation import check_length, check_token_ids

if TYPE_CHECKING:
    from engine.engine import EngineInfo

# Below this the tokenizer answers faster than a thread starts; above it the event loop would stall.
INLINE_SIZE = 4096
CHARS_AROUND_MESSAGE = 32
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as parsed, not yet checked against the vocabulary."""

    ids: Any


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and string `content`, to be rendered by the model's chat template."""

    messages: tuple[Mapping[str, str], ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


async def run_sized(function: Callable[[], T], size: int) -> T:
    """Run tokenizer work here, or in a thread where `size` characters or ids would hold up the event loop."""
    return function() if size <= INLINE_SIZE else await asyncio.to_thread(function)


async def encode_chat(tokenizer: Tokenizer, messages: tuple[Mapping[str, str], ...]) -> list[int]:
    # What the template writes around a message is work too, also where the message is empty.
    size = sum(CHARS_AROUND_MESSAGE + len(message["content"]) for message in messages)
    return await run_sized(lambda: tokenizer.encode_chat(messages), size)


async def encode(prompt: Prompt, tokenizer: Tokenizer, info: "EngineInfo", param: str) -> tuple[int, ...]:
    """Token ids of one prompt; `param` names its field in errors."""
    match prompt:
        case TextPrompt(text):
            if not text:
                # Also where the tokenizer would put a token in front.
                raise invalid(f"{param} is empty; it must have at least one character", param)
            return _known(await run_sized(lambda: tokenizer.encode(text), len(text)), info, param)
        case TokenPrompt(ids):
            if isinstance(ids, list | tuple):
                # Before looking at each: a list far too long is refused at no cost.
                check_length(len(ids), 0, info, param)
            return check_token_ids(ids, param, info.vocab_size)
        case ChatPrompt(messages):
            return _known(await encode_chat(tokenizer, messages), info, param)


def _known(ids: list[int], info: "EngineInfo", param: str) -> tuple[int, ...]:
    """Some tokenizers have more tokens than their model."""
    largest = max(ids, default=0)
    if largest >= info.vocab_size:
        raise invalid(f"{param} has the token {largest}; this model's are those from 0 to {info.vocab_size - 1}", param)
    return tuple(ids)
