"""What clients say about tools: their shape, how models that know them write calls, and calls of earlier turns."""

import json
from typing import Any

import pytest

from engine.errors import ErrorKind, RequestError
from server.tools.format import HERMES, LLAMA, tool_format
from server.tools.messages import tool_fields
from server.tools.request import MAX_TOOLS, Tool, ToolChoice, check_tool_choice, check_tools

# In the manner of Qwen2.5 and Hermes 2 Pro, of Llama 3.1, and of models that write calls in other ways.
QWEN = (
    r"""{%- if tools %}{{- "<tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"""
    r"""{{- "</tools> For each call return <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}"""
    r"""{%- endif %}"""
)
NOUS = """{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>
{'arguments': <args-dict>, 'name': <function-name>}
</tool_call>"""
LLAMA_3 = (
    """{%- if tools is not none %}{{- '<|start_header_id|>user<|end_header_id|> """
    """Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}{%- endif %}"""
)
XML = """{% if tools %}<tool_call>\n<function=name>\n"arguments": "parameters":</function>\n</tool_call>{% endif %}"""
MISTRAL = """{% if tools %}[AVAILABLE_TOOLS][{"type": "function", "parameters": {}}][/AVAILABLE_TOOLS]{% endif %}"""
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}{{ message.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "format"),
    [(QWEN, HERMES), (NOUS, HERMES), (LLAMA_3, LLAMA), (XML, None), (MISTRAL, None), (CHATML, None)],
)
def test_the_template_tells_how_calls_are_written(template: str, format: object) -> None:
    assert tool_format(template) == format


def test_markers_that_have_no_text_cannot_be_found() -> None:
    assert tool_format(QWEN, {"<|im_end|>", "<tool_call>"}) is None
    assert tool_format(QWEN, {"<|im_end|>"}) == HERMES


def tool(name: str = "get", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_tools_in_openais_shape() -> None:
    raw = [tool(description="Gets.", parameters=SCHEMA, strict=True), tool("a-B_9", strict=None), tool("c" * 64)]
    first, second, third = check_tools(raw)
    assert first == Tool("get", SCHEMA, True, raw[0])
    assert (second.name, second.is_strict, third.name) == ("a-B_9", False, "c" * 64)
    assert second.parameters == {"type": "object", "properties": {}, "additionalProperties": False}
    assert check_tools(None) == check_tools([]) == ()
    assert len(check_tools([tool(f"t{index}") for index in range(MAX_TOOLS)])) == MAX_TOOLS


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ({}, "tools"),
        ([1], "tools[0]"),
        ([tool(), {"type": "retrieval"}], "tools[1]"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(), tool("a"), tool("b"), tool("")], "tools[3].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool("a\n")], "tools[0].function.name"),
        ([tool("é")], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(strict="yes")], "tools[0].function.strict"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters"),
        ([tool(parameters={"x": float("nan")})], "tools[0]"),
        ([tool(description="\ud800")], "tools[0]"),
        ([tool(f"t{index}") for index in range(MAX_TOOLS + 1)], "tools"),
        ([tool(description="x" * 2**15), tool("b", description="x" * 2**15)], "tools"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named(raw: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_tools(raw)
    assert (raised.value.kind, raised.value.param) == (ErrorKind.INVALID, param)
    assert len(raised.value.message) < 200


def test_choices() -> None:
    tools = check_tools([tool(), tool("other")])
    named = {"type": "function", "function": {"name": "other"}}
    assert check_tool_choice(None, tools) == check_tool_choice("auto", tools) == ToolChoice(is_allowed=True)
    assert check_tool_choice("none", tools) == check_tool_choice(None, ()) == ToolChoice(is_allowed=False)
    assert check_tool_choice("required", tools) == ToolChoice(True, True)
    assert check_tool_choice(named, tools) == ToolChoice(True, True, "other")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        ("any", "tool_choice"), (1, "tool_choice"), ({"type": "function"}, "tool_choice"),
        ({"type": "function", "function": {"name": 1}}, "tool_choice"),
        ({"type": "function", "function": {"name": "nope"}}, "tool_choice.function.name"),
    ],
)  # fmt: skip
def test_a_choice_that_is_none(raw: object, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        check_tool_choice(raw, check_tools([tool()]))
    assert raised.value.param == param


def test_no_tool_can_be_required_where_there_is_none() -> None:
    with pytest.raises(RequestError):
        check_tool_choice("required", ())


def call(id: str = "call_1", name: str = "get", arguments: object = '{"city": "Ulm"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_of_earlier_turns_become_what_templates_expect() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call(), call("call_2", "other", "{}")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "1"},
        {"role": "tool", "tool_call_id": "call_1", "content": "2", "name": "own"},
        {"role": "tool", "tool_call_id": "call_9", "content": "3"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": []},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None},
        "not a message",
    ]
    before = json.dumps(messages)
    function = {"name": "get", "arguments": {"city": "Ulm"}}
    assert tool_fields(messages) == {
        1: {
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": function},
                {"id": "call_2", "type": "function", "function": {"name": "other", "arguments": {}}},
            ]
        },
        2: {"tool_call_id": "call_2", "name": "other"},
        3: {"tool_call_id": "call_1", "name": "own"},
        4: {"tool_call_id": "call_9"},
    }
    assert json.dumps(messages) == before


DEEP = "[" * 100_000
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "tool_calls": [call(arguments=text)]}, ARGUMENTS)
        for text in ("", "[1]", "{", '{"a": NaN}', '"{}"', "null", '{"a": ' + DEEP, {}, None)
    ]
    + [
        ({"role": "assistant", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [call()] * 129}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call() | {"type": "x"}]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [call(), call(name="a b")]}, "messages[1].tool_calls[1].function.name"),
        ({"role": "assistant", "tool_calls": [call(id="")]}, "messages[1].tool_calls[0].id"),
        ({"role": "user", "tool_calls": [call()]}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "1"}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "x" * 257}, "messages[1].tool_call_id"),
        ({"role": "tool", "tool_call_id": "x", "name": 1}, "messages[1].name"),
    ],
)
def test_what_is_wrong_with_an_earlier_call_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as raised:
        tool_fields([{"role": "user", "content": "x"}, message])
    assert (raised.value.kind, raised.value.param) == (ErrorKind.INVALID, param)
    assert len(raised.value.message) < 200
