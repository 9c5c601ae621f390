"""Tool calls and their results in the messages that a client sends back."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from engine.errors import RequestError, invalid
from server.tools.request import MAX_TOOLS, NAME, NAME_BOUND

MAX_ID_CHARS = 256


def tool_fields(messages: Sequence[object]) -> dict[int, dict[str, Any]]:
    """What templates are to find in some of the messages beside role and content, by index.

    Of an assistant message with `tool_calls` these, their arguments parsed, as templates expect them; of one with role
    tool its `tool_call_id`, and its `name`, where it or the call that it answers has one. Raises RequestError for the
    first field that is wrong. What is no object is left to others.
    """
    fields: dict[int, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            continue
        if message.get("role") == "tool":
            fields[index] = _result(message, names, where)
        elif message.get("tool_calls") is not None:
            if message.get("role") != "assistant":
                raise invalid(f"{where}.tool_calls: only messages of role assistant have them", f"{where}.tool_calls")
            calls = _calls(message["tool_calls"], f"{where}.tool_calls")
            names |= {call["id"]: call["function"]["name"] for call in calls}
            if calls:
                fields[index] = {"tool_calls": calls}
    return fields


def _result(message: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    id = _id(message.get("tool_call_id"), f"{where}.tool_call_id")
    name = message.get("name")
    if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name)):
        raise invalid(f"{where}.name must be {NAME_BOUND}", f"{where}.name")
    known = names.get(id) if name is None else name
    return {"tool_call_id": id} | ({} if known is None else {"name": known})


def _calls(raw: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise invalid(f"{where} must be a list of at most {MAX_TOOLS} calls", where, "invalid_type")
    return [_call(item, f"{where}[{index}]") for index, item in enumerate(raw)]


def _call(raw: object, where: str) -> dict[str, Any]:
    function = raw.get("function") if isinstance(raw, Mapping) and raw.get("type") == "function" else None
    if not isinstance(raw, Mapping) or not isinstance(function, Mapping):
        raise invalid(f'{where} must be {{"id": a string, "type": "function", "function": an object}}', where)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{where}.function.name must be {NAME_BOUND}", f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    id = _id(raw.get("id"), f"{where}.id")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _id(raw: object, where: str) -> str:
    if not isinstance(raw, str) or not 1 <= len(raw) <= MAX_ID_CHARS:
        raise invalid(f"{where} must be a string of 1 to {MAX_ID_CHARS} characters", where)
    return raw


def _arguments(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, str):
        raise _no_object(where)
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError:
        raise _no_object(where) from None
    if not isinstance(value, dict):
        raise _no_object(where)
    return value


def _no_object(where: str) -> RequestError:
    return invalid(f"{where} must be a string that holds a JSON object", where)
