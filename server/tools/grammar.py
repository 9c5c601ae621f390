"""What an answer may be where tools must be called, or must be called as their schemas say."""

import json
from collections.abc import Sequence

from server.structured.texts import HEADER, GrammarText, schema_rule
from server.tools.format import ToolFormat
from server.tools.request import Tool, ToolChoice

MAX_CALLS = 32
TEXT = "TEXT: /(.|\\n)*/\n"
TEXT_BUT_CALLS = "TEXT: /([^{](.|\\n)*)?/\n"


def tool_grammar(
    format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool = True
) -> GrammarText | None:
    """None: any text will do. Where the choice is the model's, only the arguments of strict tools are held to their
    schema, any object will do for those of others, and `is_parallel` is not enforced.

    Raises RequestError for schemas that are none.
    """
    if not choice.is_allowed or not (choice.is_required or any(tool.is_strict for tool in tools)):
        return None
    offered = [(index, tool) for index, tool in enumerate(tools) if choice.name in (None, tool.name)]
    rules = "".join(_rule(format, index, tool, choice) for index, tool in offered)
    body = f"body: {' | '.join(f'tool_{index}' for index, _ in offered)}\n"
    start = _must(format, choice, is_parallel) if choice.is_required else _may(format)
    return GrammarText(HEADER + start + body + rules, "tools")


def _rule(format: ToolFormat, index: int, tool: Tool, choice: ToolChoice) -> str:
    head = json.dumps(f'{{"name": "{tool.name}", "{format.arguments_key}": ')
    # Not as a part of one schema for the whole call: references start at the root.
    schema = tool.parameters if choice.is_required or tool.is_strict else {"type": "object"}
    return f'tool_{index}: {head} {schema_rule(schema, f"tools[{index}].function.parameters")} "}}"\n'


def _must(format: ToolFormat, choice: ToolChoice, is_parallel: bool) -> str:
    repeat = f" ({_between(format)} call){{0,{MAX_CALLS - 1}}}" if is_parallel and choice.name is None else ""
    if not format.opening:
        return f"start: call{repeat}\ncall: body\n"
    return f'start: call{repeat}\ncall: {json.dumps(format.opening)} "\\n" body "\\n" {json.dumps(format.closing)}\n'


def _may(format: ToolFormat) -> str:
    if not format.opening:
        return f"start: TEXT | body ({_between(format)} body){{0,{MAX_CALLS - 1}}}\n" + TEXT_BUT_CALLS
    opening, closing = json.dumps(format.opening + "\n"), json.dumps("\n" + format.closing)
    return f"start: call* TEXT\nopening[lazy]: TEXT {opening}\ncall: opening body {closing}\n" + TEXT


def _between(format: ToolFormat) -> str:
    return json.dumps(f"{format.separator} " if format.separator else "\n")
