"""Tool calls that are required, or of strict tools: the grammar writes what the parser finds."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.errors import ErrorKind, RequestError
from server.structured.texts import GrammarText
from server.tools.format import HERMES, LLAMA, ToolFormat
from server.tools.grammar import tool_grammar
from server.tools.parser import CallArguments, CallStart, ToolParser
from server.tools.request import ToolChoice, check_tools
from tests.helpers import byte_tokenizer
from tests.server.answers import END, Compile, allowed, can_take, compiler, take


@pytest.fixture(scope="module")
def compile() -> Iterator[Compile]:
    with compiler() as function:
        yield function


WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Ulm", "Ulmen"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_weather_all"}},
]
REQUIRED = ToolChoice(is_allowed=True, is_required=True)


def tool_text(format: ToolFormat, choice: ToolChoice, strict: bool = False, **options: bool) -> GrammarText | None:
    first = {"type": "function", "function": TOOLS[0]["function"] | {"strict": strict}}
    return tool_grammar(format, check_tools([first, TOOLS[1]]), choice, **options)


def call_text(format: ToolFormat, name: str, arguments: str) -> str:
    object = f'{{"name": "{name}", "{format.arguments_key}": {arguments}}}'
    return f"{format.opening}\n{object}\n{format.closing}" if format.opening else object


FORMATS = pytest.mark.parametrize("format", [HERMES, LLAMA], ids=["hermes", "llama"])


@FORMATS
@pytest.mark.parametrize("choice", [REQUIRED, replace(REQUIRED, name="get_weather")], ids=["any", "named"])
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_what_the_parser_finds(
    compile: Compile, format: ToolFormat, choice: ToolChoice, is_parallel: bool
) -> None:
    text = tool_text(format, choice, is_parallel=is_parallel)
    assert text is not None
    grammar, tokenizer, names, several = compile(text), byte_tokenizer(), set(), 0
    for seed in range(12):
        rng, answer, data = random.Random(seed), grammar.start(), b""
        for _ in range(1500):
            tokens = allowed(answer)
            if END in tokens and (answer.is_complete or rng.random() < 0.5):
                break
            token = rng.choice(sorted(tokens - {END}))
            answer.accept(token)
            data += tokenizer.token_bytes(token)
        else:
            raise AssertionError("did not end")
        parser = ToolParser(format, {"get_weather", "get_weather_all"})
        pieces = parser.feed(data.decode()) + parser.finish()
        starts = [piece for piece in pieces if isinstance(piece, CallStart)]
        arguments = [json.loads(piece.text) for piece in pieces if isinstance(piece, CallArguments)]
        assert len(starts) + len(arguments) == len(pieces) and len(starts) == len(arguments) > 0
        for start, value in zip(starts, arguments, strict=True):
            assert (value.get("city") in ("Ulm", "Ulmen")) if start.name == "get_weather" else value == {}
        names |= {start.name for start in starts}
        several += len(starts) > 1
    assert names == ({"get_weather"} if choice.name else {"get_weather", "get_weather_all"})
    assert bool(several) == (is_parallel and choice.name is None)


@FORMATS
def test_a_choice_of_the_models_own_is_free_unless_a_tool_is_strict(compile: Compile, format: ToolFormat) -> None:
    auto = ToolChoice(is_allowed=True)
    assert tool_text(format, auto) is None
    assert tool_text(format, ToolChoice(is_allowed=False), strict=True) is None
    text = tool_text(format, auto, strict=True)
    assert text is not None
    grammar = compile(text)
    good = call_text(format, "get_weather", '{"city": "Ulm"}')
    for answer in ["", "Hello <tool_cal é", good, call_text(format, "get_weather_all", '{"any": [1]}')]:
        started = grammar.start()
        take(started, answer)
        assert END in allowed(started)
    bad = [call_text(format, "get_weather", '{"city": "Berlin"}'), call_text(format, "nope", "{}")]
    assert not any(can_take(grammar.start(), answer) for answer in bad)
    if format is HERMES:
        take(grammar.start(), f"Let me see. {good}\nAnd {good}. Done < >")


@FORMATS
def test_a_schema_that_cannot_be_used_is_told(compile: Compile, format: ToolFormat) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
    text = tool_grammar(format, check_tools([{"type": "function", "function": function}]), REQUIRED)
    assert text is not None
    with pytest.raises(RequestError) as raised:
        compile(text)
    assert (raised.value.kind, raised.value.param) == (ErrorKind.INVALID, "tools")
