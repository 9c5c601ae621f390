"""The messages of a conversation, from what a client wrote to what chat templates take."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import invalid
from server.fields import MessageFields
from server.tools.messages import tool_fields
from server.validation import parse


def parse_messages(raw: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Messages with plain string content; text parts are joined by newlines, `developer` becomes `system`. Calls of
    tools, and what they gave, are as templates expect them. Raises RequestError for the first that is wrong."""
    messages = []
    more = tool_fields(raw)
    for index, item in enumerate(raw):
        where = f"messages[{index}]"
        fields = _message(item, where)
        role = "system" if fields.role == "developer" else fields.role
        own = more.get(index, {})
        # A message that only calls tools may have no text.
        content = "" if fields.content is None and own else _content(fields.content, f"{where}.content")
        messages.append({"role": role, "content": content, **own})
    return tuple(messages)


def _message(item: object, where: str) -> MessageFields:
    if isinstance(item, dict):
        for name in ("function_call", "audio"):
            if item.get(name):
                raise invalid(f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter")
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
