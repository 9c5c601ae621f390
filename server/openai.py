"""The OpenAI API as values: request models, and what both endpoints' answers share. Nothing here does I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from engine.errors import invalid
from engine.request import Usage
from server.ask import Ask
from server.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from server.unsupported import refuse_unsupported
from server.validation import (
    MAX_LOGPROBS,
    TOKEN_IDS_SCHEMA,
    Fields,
    Flag,
    GenerationFields,
    MaxTokens,
    ScoringFields,
    parse,
)

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16
ROLES = ("system", "developer", "user", "assistant")
ModelName = Annotated[str, Field(description="the name of the served model")]


class StreamOptions(Fields):
    include_usage: Flag = None
    include_obfuscation: Flag = None


PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {**TOKEN_IDS_SCHEMA, "minItems": 1},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
StreamOptionsField = Annotated[
    Any, WithJsonSchema({"type": "object", "properties": {"include_usage": {"type": "boolean"}}})
]
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
    },
}
MessagesField = Annotated[
    list[Any],
    Field(min_length=1, description="a list of at least one message"),
    WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}),
]
NumLogprobs = Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")]


class AnswerFields(Fields):
    """What both endpoints take about the form of an answer."""

    model: ModelName
    stream: Flag = None
    stream_options: StreamOptionsField = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None


class CompletionFields(AnswerFields, ScoringFields):
    prompt: PromptField = None
    logprobs: NumLogprobs = None
    echo: Flag = None


class ChatFields(AnswerFields, GenerationFields):
    messages: MessagesField
    max_completion_tokens: MaxTokens = None
    logprobs: Flag = None
    top_logprobs: NumLogprobs = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A parsed call: choice `i` continues prompt `i // n`, as in the OpenAI API."""

    ask: Ask
    stream: bool
    include_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall(Call):
    echo: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall(Call):
    pass


def _form(fields: AnswerFields) -> dict[str, bool]:
    """The form of the answer, as arguments of a `Call`."""
    stream, include_usage = bool(fields.stream), False
    if fields.stream_options is not None:
        if not stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options")
        include_usage = bool(parse(StreamOptions, fields.stream_options, "stream_options").include_usage)
    return {
        "stream": stream,
        "include_usage": include_usage,
        "return_token_ids": bool(fields.return_token_ids),
        "tokens_as_ids": bool(fields.return_tokens_as_token_ids),
    }


def parse_completion(raw: Mapping[str, Any]) -> CompletionCall:
    """Body of POST /v1/completions. Raises RequestError for the first bad field."""
    fields = parse(CompletionFields, raw)
    refuse_unsupported(raw, CompletionFields.model_fields)
    form, echo = _form(fields), bool(fields.echo)
    if fields.max_tokens == 0 and not echo:
        raise invalid("max_tokens must be at least 1 unless echo is true", "max_tokens")
    # Without generated tokens it is the prompt's that the engine computes.
    is_scored = echo and (fields.logprobs is not None or fields.max_tokens == 0)
    ask = Ask(
        model=fields.model,
        prompts=_prompts(fields.prompt),
        prompt_param="prompt",
        fields=fields,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=fields.logprobs,
        num_prompt_logprobs=(fields.logprobs or 0) if is_scored else None,
    )
    return CompletionCall(ask=ask, echo=echo, **form)


def parse_chat(raw: Mapping[str, Any]) -> ChatCall:
    """Body of POST /v1/chat/completions. Raises RequestError for the first bad field."""
    fields = parse(ChatFields, raw)
    refuse_unsupported(raw, ChatFields.model_fields)
    form = _form(fields)
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs is only allowed when logprobs is true", "top_logprobs")
    generation: GenerationFields = fields
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        generation = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    ask = Ask(
        model=fields.model,
        prompts=(ChatPrompt(parse_messages(fields.messages)),),
        prompt_param="messages",
        fields=generation,
        default_max_tokens=None,
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    return ChatCall(ask=ask, **form)


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
    fingerprint: str

    def wrap(self, object: str, choices: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model,
                "system_fingerprint": self.fingerprint, "choices": choices, **extra}  # fmt: skip


def model_object(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "quire", "max_model_len": max_model_len}
