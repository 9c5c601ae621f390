"""Prompts as clients write them, and the way to token ids."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.chat_template import ChatPrompt as ChatPrompt
from engine.errors import invalid
from engine.tokenizer import Tokenizer
from server.template_worker import TemplateWorkers
from server.validation import check_length, check_token_ids

if TYPE_CHECKING:
    from engine.info import EngineInfo

# Below this the tokenizer answers faster than a thread starts; above it the event loop would stall.
INLINE_SIZE = 4096
CHARS_AROUND_MESSAGE = 32
MAX_TEMPLATE_VARIABLES = 16
# What the template gets from elsewhere.
TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "bos_token", "eos_token"}
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as parsed, not yet checked against the vocabulary."""

    ids: Any


Prompt = TextPrompt | TokenPrompt | ChatPrompt


async def run_sized(function: Callable[[], T], size: int) -> T:
    """Run tokenizer work here, or in a thread where `size` characters or ids would hold up the event loop."""
    return function() if size <= INLINE_SIZE else await asyncio.to_thread(function)


async def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, templates: TemplateWorkers | None = None
) -> list[int]:
    return await _encode_chat(tokenizer, ChatPrompt(messages), None, "messages", templates)


async def encode(
    prompt: Prompt, tokenizer: Tokenizer, info: "EngineInfo", param: str, *, templates: TemplateWorkers | None = None
) -> tuple[int, ...]:
    """Token ids of one prompt; `param` names its field in errors. Without `templates` a chat is rendered in this
    process, where nothing bounds the template."""
    match prompt:
        case TextPrompt(text):
            if not text:
                # Also where the tokenizer would put a token in front.
                raise invalid(f"{param} is empty; it must have at least one character", param)
            check_fits(text, tokenizer, info, param)
            return _known(await run_sized(lambda: tokenizer.encode(text), len(text)), info, param)
        case TokenPrompt(ids):
            if isinstance(ids, list | tuple):
                # Before looking at each: a list far too long is refused at no cost.
                check_length(len(ids), 0, info, param)
            return check_token_ids(ids, param, info.vocab_size)
        case ChatPrompt():
            return _known(await _encode_chat(tokenizer, prompt, info, param, templates), info, param)


async def _encode_chat(
    tokenizer: Tokenizer,
    prompt: ChatPrompt,
    info: "EngineInfo | None",
    param: str,
    templates: TemplateWorkers | None,
) -> list[int]:
    if templates is None:
        return await run_sized(lambda: tokenizer.encode_chat(prompt), _num_chars(prompt))
    rendered = await templates.render(prompt)
    if info is not None:
        check_fits(rendered.text, tokenizer, info, param)
    return await run_sized(lambda: tokenizer.encode_rendered(rendered), len(rendered.text))


def _num_chars(prompt: ChatPrompt) -> int:
    """About how much there is to do: what a template writes around a message is work too."""
    if prompt.tools or not all(isinstance(message.get("content"), str) for message in prompt.messages):
        return INLINE_SIZE + 1
    return sum(CHARS_AROUND_MESSAGE + len(message["content"]) for message in prompt.messages)


def check_fits(text: str, tokenizer: Tokenizer, info: "EngineInfo", param: str) -> None:
    """Refuse a text that has too many tokens however it is split, before it is."""
    # Most texts need no counting: a character has at most four bytes, and a token is one or more.
    if 4 * len(text) < info.max_model_len:
        return
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= info.max_model_len:
        raise invalid(
            f"the prompt has at least {fewest} tokens, which leaves no room for output; this server's context is "
            f"{info.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )


def check_template_variables(raw: object) -> dict[str, str | int | float | bool | None]:
    """`chat_template_kwargs`: variables for the template. Raises RequestError."""
    param = "chat_template_kwargs"
    if raw is None:
        return {}
    if not isinstance(raw, dict) or len(raw) > MAX_TEMPLATE_VARIABLES:
        raise invalid(f"{param} must be an object of at most {MAX_TEMPLATE_VARIABLES} variables", param)
    for index, (name, value) in enumerate(raw.items()):
        if not name.isidentifier() or name in TEMPLATE_NAMES:
            names = ", ".join(sorted(TEMPLATE_NAMES))
            raise invalid(f"{param}: name {index + 1} must be an identifier and none of {names}", param)
        if not isinstance(value, str | int | float | bool | None):
            raise invalid(f"{param}: value {index + 1} must be a string, a number, a boolean or null", param)
    return raw


def _known(ids: list[int], info: "EngineInfo", param: str) -> tuple[int, ...]:
    """Some tokenizers have more tokens than their model."""
    largest = max(ids, default=0)
    if largest >= info.vocab_size:
        raise invalid(f"{param} has the token {largest}; this model's are those from 0 to {info.vocab_size - 1}", param)
    return tuple(ids)
