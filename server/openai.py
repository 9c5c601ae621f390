"""The OpenAI API as values: request models, and the shapes of answers. Nothing here does I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from engine.errors import invalid
from engine.request import FinishReason, Usage
from server.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from server.unsupported import refuse_unsupported
from server.validation import Fields, Flag, GenerationFields, MaxTokens, parse

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16
ROLES = ("system", "developer", "user", "assistant")
ModelName = Annotated[str, Field(description="the name of the served model")]


class StreamOptions(Fields):
    include_usage: Flag = None
    include_obfuscation: Flag = None


class CompletionFields(GenerationFields):
    model: ModelName
    prompt: Any = None
    stream: Flag = None
    stream_options: Any = None


class ChatFields(GenerationFields):
    model: ModelName
    messages: Annotated[list[Any], Field(min_length=1, description="a list of at least one message")]
    max_completion_tokens: MaxTokens = None
    stream: Flag = None
    stream_options: Any = None


class MessageFields(Fields):
    role: Annotated[
        Literal["system", "developer", "user", "assistant"], Field(description=f"one of {', '.join(ROLES)}")
    ]
    content: Any = None


class TokenizeFields(Fields):
    model: Annotated[str | None, Field(description="the name of the served model")] = None
    prompt: Annotated[str | None, Field(description="a string")] = None
    messages: Annotated[list[Any] | None, Field(min_length=1, description="a list of at least one message")] = None
    add_special_tokens: Flag = None
    return_token_strs: Flag = None


class DetokenizeFields(Fields):
    model: Annotated[str | None, Field(description="the name of the served model")] = None
    tokens: Any


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed generation request: choice `i` continues prompt `i // n`, as in the OpenAI API.

    `default_max_tokens` None: what is left of the context.
    """

    model: str
    prompts: tuple[Prompt, ...]
    prompt_param: str
    fields: GenerationFields
    default_max_tokens: int | None
    stream: bool
    include_usage: bool

    @property
    def n(self) -> int:
        return self.fields.n or 1

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def _options(fields: CompletionFields | ChatFields) -> tuple[bool, bool]:
    """Whether to stream, and whether to end the stream with usage."""
    stream = bool(fields.stream)
    if fields.stream_options is None:
        return stream, False
    if not stream:
        raise invalid("stream_options is only allowed when stream is true", "stream_options")
    return stream, bool(parse(StreamOptions, fields.stream_options, "stream_options").include_usage)


def parse_completion(raw: Mapping[str, Any]) -> Call:
    """Body of POST /v1/completions. Raises RequestError for the first bad field."""
    fields = parse(CompletionFields, raw)
    refuse_unsupported(raw, CompletionFields.model_fields)
    stream, include_usage = _options(fields)
    return Call(fields.model, _prompts(fields.prompt), "prompt", fields, DEFAULT_MAX_TOKENS, stream, include_usage)


def parse_chat(raw: Mapping[str, Any]) -> Call:
    """Body of POST /v1/chat/completions. Raises RequestError for the first bad field."""
    fields = parse(ChatFields, raw)
    refuse_unsupported(raw, ChatFields.model_fields)
    stream, include_usage = _options(fields)
    generation: GenerationFields = fields
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        generation = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    prompt = ChatPrompt(parse_messages(fields.messages))
    return Call(fields.model, (prompt,), "messages", generation, None, stream, include_usage)


def _prompts(raw: object) -> tuple[Prompt, ...]:
    """A string, a list of token ids, or a list of several of either. A flat list of numbers is one prompt."""
    if isinstance(raw, str):
        return (TextPrompt(raw),)
    bound = f"a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
    if not isinstance(raw, list) or not raw:
        raise invalid(f"prompt must be {bound}", "prompt")
    if not isinstance(raw[0], str | list):
        return (TokenPrompt(raw),)
    if len(raw) > MAX_PROMPTS:
        raise invalid(f"prompt must be {bound}", "prompt")
    if all(isinstance(item, str) for item in raw):
        return tuple(TextPrompt(item) for item in raw)
    if all(isinstance(item, list) for item in raw):
        return tuple(TokenPrompt(item) for item in raw)
    raise invalid(f"prompt must be {bound}; kinds must not be mixed", "prompt")


def parse_messages(raw: Sequence[Any]) -> tuple[Mapping[str, str], ...]:
    """Messages with plain string content; text parts are joined by newlines, `developer` becomes `system`."""
    messages = []
    for index, item in enumerate(raw):
        where = f"messages[{index}]"
        fields = _message(item, where)
        role = "system" if fields.role == "developer" else fields.role
        messages.append({"role": role, "content": _content(fields.content, f"{where}.content")})
    return tuple(messages)


def _message(item: object, where: str) -> MessageFields:
    if isinstance(item, dict):
        if item.get("role") in ("tool", "function"):
            raise invalid(f"{where}.role: tool calls are not supported yet", f"{where}.role", "unsupported_parameter")
        for name in ("tool_calls", "function_call", "audio"):
            if item.get(name):
                raise invalid(f"{where}.{name} is not supported yet", f"{where}.{name}", "unsupported_parameter")
    return parse(MessageFields, item, where)


def _content(raw: object, where: str) -> str:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list) or not raw:
        raise invalid(f"{where} must be a string or a list of text parts", where, "invalid_type")
    texts = []
    for index, part in enumerate(raw):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise invalid(f'{where}[{index}] must be {{"type": "text", "text": a string}}', where)
        texts.append(text)
    return "\n".join(texts)


def usage_object(usages: Mapping[int, Usage], n: int) -> dict[str, Any]:
    """Token counts of one call from those of each choice. A prompt counts once: its `n` choices share it."""
    firsts = [usage for index, usage in usages.items() if index % n == 0]
    prompt = sum(usage.num_prompt_tokens for usage in firsts)
    generated = sum(usage.num_generated_tokens for usage in usages.values())
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(usage.num_cached_tokens for usage in firsts)},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def wrap(self, object: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
                **extra}  # fmt: skip


class Shape(Protocol):
    """How an endpoint words its answers: choices of a stream in order opening, text..., end; or one whole choice."""

    id_prefix: str
    stream_object: str
    whole_object: str

    def opening(self, index: int) -> dict[str, Any] | None: ...
    def text(self, index: int, text: str) -> dict[str, Any]: ...
    def end(self, index: int, reason: FinishReason) -> dict[str, Any]: ...
    def whole(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]: ...


class CompletionShape:
    """Answers of /v1/completions: the stream uses the same object name as the whole."""

    id_prefix = "cmpl"
    stream_object = "text_completion"
    whole_object = "text_completion"

    def opening(self, index: int) -> None:
        return None

    def text(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": None}

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self.whole(index, "", reason)

    def whole(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": None, "finish_reason": reason.value}


class ChatShape:
    """Answers of /v1/chat/completions. The role comes once: clients concatenate the strings of deltas."""

    id_prefix = "chatcmpl"
    stream_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> dict[str, Any]:
        return self._choice(index, {"role": "assistant", "content": ""}, None)

    def text(self, index: int, text: str) -> dict[str, Any]:
        return self._choice(index, {"content": text}, None)

    def end(self, index: int, reason: FinishReason) -> dict[str, Any]:
        return self._choice(index, {}, reason.value)

    def whole(self, index: int, text: str, reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason.value}

    def _choice(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def model_object(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "quire", "max_model_len": max_model_len}
