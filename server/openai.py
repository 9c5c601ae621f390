"""The OpenAI API as values: request models, and what both endpoints' answers share. Nothing here does I/O."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import invalid
from engine.request import Usage
from server.ask import Ask
from server.fields import MAX_PROMPTS, AnswerFields, ChatFields, CompletionFields, StreamOptions
from server.messages import parse_messages
from server.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, check_template_variables
from server.structured.texts import GrammarText, json_object, json_schema
from server.tools.request import ToolUse, check_tool_choice, check_tools
from server.unsupported import refuse_unsupported
from server.validation import GenerationFields, parse

DEFAULT_MAX_TOKENS = 16


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
        response=parse_response_format(fields.response_format),
    )
    return CompletionCall(ask=ask, echo=echo, **form)


def parse_chat(raw: Mapping[str, Any]) -> Call:
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
    tools = check_tools(fields.tools)
    use = ToolUse(tools, check_tool_choice(fields.tool_choice, tools), fields.parallel_tool_calls is not False)
    response = parse_response_format(fields.response_format)
    if response is not None and use.choice.is_allowed:
        raise invalid("response_format and tools exclude each other unless tool_choice is none", "response_format")
    variables = check_template_variables(fields.chat_template_kwargs)
    prompt = ChatPrompt(parse_messages(fields.messages), use.for_template, variables)
    ask = Ask(
        model=fields.model,
        prompts=(prompt,),
        prompt_param="messages",
        fields=generation,
        default_max_tokens=None,
        num_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        response=response,
        tools=use,
    )
    return Call(ask=ask, **form)


def parse_response_format(raw: object) -> GrammarText | None:
    """None: the answer may be any text. Raises RequestError."""
    if raw is None:
        return None
    match raw:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return json_object()
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return json_schema(schema)
    shapes = (
        '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": an object}}'
    )
    raise invalid(f"response_format must be {shapes}", "response_format")


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
