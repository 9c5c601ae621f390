"""A model's chat template: from messages to the one text that the model was trained to continue."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import StartupError, invalid


class ChatTemplate:
    """A Jinja template that came with a model, compiled once and run in a sandbox.

    `tokens` are variables that it may use: `bos_token`, `eos_token`. Raises StartupError if it does not compile.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        # Templates are written for these settings: without them every `{% ... %}` line adds a line break.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Render `messages`. Raises RequestError for messages that the template refuses or cannot handle."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:
            # A template is a program fed with a client's data: whatever it raises is about this request.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise invalid(f"the model's chat template refused the messages: {reason}", "messages") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
