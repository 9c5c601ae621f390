"""The two endpoints of the OpenAI API that generate: what a request says, and which chunks carry text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request sends. `num_tokens`: as counted beforehand, with what the server adds; None: unknown."""

    content: str | tuple[Mapping[str, Any], ...]
    max_tokens: int
    num_tokens: int | None = None


class Endpoint(Protocol):
    """`content` is a prompt's: text, or, where it `takes_messages`, the messages of a chat."""

    path: str
    takes_messages: bool

    def body(self, content: str | tuple[Mapping[str, Any], ...]) -> dict[str, Any]: ...
    def has_text(self, choice: Mapping[str, Any]) -> bool: ...
    def tokenize_bodies(self, text: str) -> tuple[dict[str, Any], ...]:
        """Bodies for /tokenize that count what the server will make of `text`, in the words of different servers."""


class CompletionEndpoint:
    path = "/v1/completions"
    takes_messages = False

    def body(self, content: str | tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
        return {"prompt": content}

    def has_text(self, choice: Mapping[str, Any]) -> bool:
        return bool(choice.get("text"))

    def tokenize_bodies(self, text: str) -> tuple[dict[str, Any], ...]:
        return {"prompt": text}, {"content": text, "add_special": True}


class ChatEndpoint:
    path = "/v1/chat/completions"
    takes_messages = True

    def body(self, content: str | tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}] if isinstance(content, str) else content}

    def has_text(self, choice: Mapping[str, Any]) -> bool:
        """Also what a model thinks, and the tools it calls, take tokens. The opening with a role alone does not."""
        delta = choice.get("delta")
        names = ("content", "reasoning_content", "reasoning", "tool_calls")
        return isinstance(delta, dict) and any(delta.get(name) for name in names)

    def tokenize_bodies(self, text: str) -> tuple[dict[str, Any], ...]:
        return (self.body(text),)
