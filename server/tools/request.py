"""The tools that a client offers and how the model may use them: `tools`, `tool_choice`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError, invalid
from server.structured.texts import size

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**16
NAME = re.compile("[A-Za-z0-9_-]{1,64}")
NAME_BOUND = "1 to 64 of the characters A-Z, a-z, 0-9, _ and -"
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. `parameters`: the JSON schema of its arguments, an object's. `raw`: what templates are given."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may call tools, whether it must, and, where that is fixed, which one it calls once."""

    is_allowed: bool
    is_required: bool = False
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`is_parallel`: whether an answer may call more than one."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice(is_allowed=False)
    is_parallel: bool = True

    @property
    def for_template(self) -> list[Mapping[str, Any]] | None:
        return [tool.raw for tool in self.tools] if self.choice.is_allowed else None


def check_tools(raw: object) -> tuple[Tool, ...]:
    """`tools` in OpenAI's shape. Raises RequestError for the first that is wrong."""
    if raw is None:
        return ()
    if not isinstance(raw, list):
        raise invalid("tools must be a list", "tools", "invalid_type")
    if len(raw) > MAX_TOOLS:
        raise invalid(f"tools may hold at most {MAX_TOOLS} tools", "tools")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(raw))
    names: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(tools):
        if tool.name in names:
            name = f"tools[{index}].function.name"
            raise invalid(f"{name} is that of an earlier tool; names must differ", name)
        names.add(tool.name)
        num_bytes += size(tool.raw, f"tools[{index}]")
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid(f"tools are larger than {MAX_TOOLS_BYTES} bytes together", "tools")
    return tools


def _tool(raw: object, where: str) -> Tool:
    if not isinstance(raw, Mapping) or raw.get("type") != "function":
        raise invalid(f'{where} must be {{"type": "function", "function": an object}}', where)
    function = raw.get("function")
    where = f"{where}.function"
    if not isinstance(function, Mapping):
        raise _type_error(f"{where}", "an object")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{where}.name must be {NAME_BOUND}", f"{where}.name")
    if not isinstance(function.get("description", ""), str | None):
        raise _type_error(f"{where}.description", "a string")
    if not isinstance(function.get("strict"), bool | None):
        raise _type_error(f"{where}.strict", "true or false")
    parameters = function.get("parameters")
    if parameters is not None and (not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object"):
        raise _type_error(f"{where}.parameters", "a JSON schema of type object")
    schema = NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return Tool(name, schema, bool(function.get("strict")), {"type": "function", "function": function})


def _type_error(name: str, bound: str) -> RequestError:
    return invalid(f"{name} must be {bound}", name, "invalid_type")


def check_tool_choice(raw: object, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice`; where it is not given, tools may be called if there are any. Raises RequestError."""
    if raw is None or raw == "auto":
        return ToolChoice(is_allowed=bool(tools))
    if raw == "none":
        return ToolChoice(is_allowed=False)
    if raw == "required":
        if not tools:
            raise invalid("tool_choice is required, but there are no tools", "tool_choice")
        return ToolChoice(is_allowed=True, is_required=True)
    function = raw.get("function") if isinstance(raw, Mapping) and raw.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        shape = '{"type": "function", "function": {"name": the name of a tool}}'
        raise invalid(f"tool_choice must be none, auto, required or {shape}", "tool_choice")
    if function["name"] not in {tool.name for tool in tools}:
        raise invalid("tool_choice.function.name is the name of none of the tools", "tool_choice.function.name")
    return ToolChoice(is_allowed=True, is_required=True, name=function["name"])
