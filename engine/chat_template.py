"""A model's chat template: from messages to the one text that the model was trained to continue."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import RequestError, StartupError, invalid
from engine.special_text import SpecialText

MAX_RENDERED_BYTES = 8 * 2**20
MAX_REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a client wrote for the template: messages and tools as JSON objects, and `variables` by name."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text. `sentinel`, where there is one, stands inside the special tokens that the client spelled out
    and is to be removed; every special token that is whole is the template's own."""

    text: str
    sentinel: str | None = None


class ChatTemplate:
    """A Jinja template that came with a model, compiled once and run in a sandbox.

    `tokens` are variables that it may use: `bos_token`, `eos_token`. Raises StartupError if it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        self.source = source
        self.tokens = dict(tokens)
        # Templates are written for these settings: without them every `{% ... %}` line adds a line break.
        # Without the optimizer, and with something to call for each output, no constant is worked out while compiling,
        # where no bound holds.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=_as_it_is,
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            reason = (error.message or "").rstrip(".")
            raise StartupError(
                f"the model's chat template, line {error.lineno}: {reason}; expected a template that Jinja2 can compile"
            ) from error

    def render(self, prompt: ChatPrompt) -> str:
        """Render `prompt`. Raises RequestError for messages that the template refuses or cannot handle, and for a
        result of more than `MAX_RENDERED_BYTES`."""
        variables = {
            **self.tokens,
            **prompt.variables,
            "messages": prompt.messages,
            "tools": prompt.tools,
            "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        try:
            return _join(self._template.generate(variables))
        except RequestError:
            raise
        except MemoryError as error:
            raise invalid(
                "the model's chat template needs more memory for the messages than it may", "messages"
            ) from error
        except Exception as error:
            # A template is a program fed with a client's data: whatever it raises is about this request.
            reason = " ".join(str(error).split())[:MAX_REASON_CHARS] or type(error).__name__
            raise invalid(f"the model's chat template refused the messages: {reason}", "messages") from error


class ChatRenderer:
    """A chat template that keeps its own special tokens and those that a client spells out apart."""

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str]):
        self._template = template
        self._special_text = SpecialText(special_tokens)

    def render(self, prompt: ChatPrompt) -> Rendered:
        """Raises RequestError as `ChatTemplate.render` and `SpecialText.break_up` do."""
        try:
            client, variables, sentinel = self._special_text.break_up([prompt.messages, prompt.tools], prompt.variables)
        except RecursionError as error:
            raise invalid("messages are nested too deeply", "messages") from error
        if sentinel is not None:
            messages, tools = client
            prompt = ChatPrompt(messages, tools, variables, prompt.add_generation_prompt)
        return Rendered(self._template.render(prompt), sentinel)


def _join(chunks: Iterable[str]) -> str:
    parts, size = [], 0
    for chunk in chunks:
        size += len(chunk.encode("utf-8", "surrogatepass"))
        if size > MAX_RENDERED_BYTES:
            raise invalid(
                f"the model's chat template makes more than {MAX_RENDERED_BYTES} bytes of the messages; send less",
                "messages",
            )
        parts.append(chunk)
    return "".join(parts)


@jinja2.pass_context
def _as_it_is(context: jinja2.runtime.Context, value: Any) -> Any:
    return value


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
