"""Tool calls in an answer's text: what is a call and what is content, however the text arrives."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.tools.format import HERMES, LLAMA, ToolFormat
from server.tools.parser import CallArguments, CallStart, Content, Piece, ToolParser

NAMES = ("get", "get_all")
Items = list[tuple[str, ...]]  # ("text", content) or ("call", name, arguments), in order


def pieces_of(format: ToolFormat, parts: Sequence[str]) -> list[Piece]:
    parser = ToolParser(format, NAMES)
    pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
    assert parser.num_calls == sum(isinstance(piece, CallStart) for piece in pieces)
    return pieces


def items_of(pieces: Sequence[Piece]) -> Items:
    """As a client that reads a stream puts them together."""
    items: Items = []
    ids = []
    for piece in pieces:
        match piece:
            case Content(text):
                assert text
                if items and items[-1][0] == "text":
                    text = items.pop()[1] + text
                items.append(("text", text))
            case CallStart(index, id, name):
                assert index == len(ids) and re.fullmatch("call_[0-9a-f]{24}", id)
                ids.append(id)
                items.append(("call", name, ""))
            case CallArguments(index, text):
                assert index == len(ids) - 1 and text
                kind, name, before = items.pop()
                items.append((kind, name, before + text))
    assert len(set(ids)) == len(ids)
    return items


def parse(format: ToolFormat, text: str) -> Items:
    return items_of(pieces_of(format, [text]))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", "<tool_call>", '"', "\\", '\\"}', "}{][", "é😀", "; {"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@st.composite
def objects(draw: st.DrawFn, key: str) -> tuple[str, str, str]:
    """The object of a call as text, its name and the text of its arguments."""
    name = draw(st.sampled_from(NAMES))
    value = draw(st.dictionaries(st.text(max_size=4), json_values, max_size=3))
    arguments = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    members = [f'"name": "{name}"', f'"{key}":{draw(st.sampled_from(["", " "]))}{arguments}']
    if draw(st.booleans()):
        members.append(draw(st.sampled_from(['"type": "function"', '"id": 12', '"x": [{"name": "get"}]'])))
    space = draw(st.sampled_from(["", " ", "\n"]))
    text = f"{{{space}{f',{space}'.join(draw(st.permutations(members)))}{space}}}"
    assert json.loads(text)["name"] == name
    return text, name, arguments


MALFORMED = (
    '<tool_call>{"name": "nope", "arguments": {}}</tool_call>',
    '<tool_call>\n{"name": "get", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "get", "arguments": "{}"}\n</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"name" "get"}</tool_call>',
    '<tool_call>{"name": get}</tool_call>',
    '<tool_call>{"name": "\\x"}</tool_call>',
    "<tool_call>get(1)</tool_call>",
    "<tool_call></tool_call>",
    "</tool_call>",
    "<tool_call>",
)
contents = st.text(st.sampled_from("<tool_cal/ \nxé😀"), max_size=12) | st.sampled_from(MALFORMED)


@st.composite
def hermes_answers(draw: st.DrawFn) -> tuple[str, Items]:
    """An answer, and what is in it, known because it was made so."""
    text, items, content, touches_call = "", [], "", False
    for part in draw(st.lists(contents | objects("arguments"), max_size=6)):
        if isinstance(part, str):
            # After a call its closing marker would be that call's.
            part = part if not (touches_call and not content.strip() and part.strip().startswith("</")) else "x"
            content += part
            text += part
            continue
        object, name, arguments = part
        if content.strip():
            items.append(("text", content.lstrip() if touches_call else content))
            items[-1] = ("text", items[-1][1].rstrip())
        space = draw(st.sampled_from(["", "\n", "\n\n "]))
        text += f"<tool_call>{space}{object}{space}</tool_call>"
        items.append(("call", name, arguments))
        content, touches_call = "", True
    content = content.lstrip() if touches_call else content
    if content:
        items.append(("text", content))
    return text, items


@given(hermes_answers(), st.data())
def test_calls_and_content_are_told_apart_however_the_text_is_split(
    answer: tuple[str, Items], data: st.DataObject
) -> None:
    text, items = answer
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(HERMES, text) == items
    assert items_of(pieces_of(HERMES, parts)) == items
    assert items_of(pieces_of(HERMES, list(text))) == items


@pytest.mark.parametrize(
    ("behind", "rest"),
    [("</tool_call><", "<"), ("</tool_call>\n<", "<"), ("</tool_call></tool", "</tool"), ("<", ""), ("</tool_ca", "")],
)
def test_a_cut_closing_marker_is_no_content_and_the_beginning_of_another_one_is(behind: str, rest: str) -> None:
    text = '<tool_call>{"name": "get", "arguments": {}}' + behind
    items: Items = [("call", "get", "{}")] + ([("text", rest)] if rest else [])
    assert parse(HERMES, text) == items
    assert items_of(pieces_of(HERMES, list(text))) == items


@given(st.lists(objects("parameters"), min_size=1, max_size=4), st.data())
def test_an_answer_that_is_calls(calls: list[tuple[str, str, str]], data: st.DataObject) -> None:
    between = data.draw(st.sampled_from(["; ", ";", "\n", " ;\n"]))
    before = data.draw(st.sampled_from(["", "\n", "<|python_tag|>", " <|python_tag|> "]))
    after = data.draw(st.sampled_from(["", "\n", "Done. "]))
    text = before + between.join(text for text, _, _ in calls) + after
    items: Items = [("call", name, arguments) for _, name, arguments in calls]
    if after.strip():
        items.append(("text", after))
    assert parse(LLAMA, text) == items
    assert items_of(pieces_of(LLAMA, list(text))) == items


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "Hello", 'Use {"name": "get", "parameters": {}}', '{"name": "nope", "parameters": {}}', '{"a": 1}',
        '{"name": "get"', "<|python_tag|>x", "<|pyth", "[1]", '{"name": "get", "parameters": []}',
        "<tool_call> ",
    ],
)  # fmt: skip
def test_an_answer_that_is_no_call_is_content_as_it_is(text: str) -> None:
    """Also where the first of it could have been a call."""
    assert parse(LLAMA, text) == ([("text", text)] if text else [])


@given(st.text(st.sampled_from("<tool_cal>/ \nx"), max_size=40))
def test_only_what_could_be_a_marker_is_held_back(text: str) -> None:
    parser = ToolParser(HERMES, NAMES)
    seen = ""
    for end, char in enumerate(text, 1):
        seen += "".join(piece.text for piece in parser.feed(char) if isinstance(piece, Content))
        held = text[:end].removeprefix(seen)
        assert len(seen) + len(held) == end
        # White space before it, or inside of a call that may begin.
        assert any(re.fullmatch(rf"\s*{HERMES.opening[:length]}", held) for length in range(11)) or re.fullmatch(
            rf"\s*{HERMES.opening}\s*", held
        )
    seen += "".join(piece.text for piece in parser.finish() if isinstance(piece, Content))
    assert seen == text


def test_a_call_starts_with_its_name_and_its_arguments_grow() -> None:
    parser = ToolParser(HERMES, NAMES)
    assert parser.feed('One.\n<tool_call>\n{"name": "get", "arguments": ') == [Content("One.")]
    start, arguments = parser.feed('{"a": ')
    assert isinstance(start, CallStart) and (start.index, start.name) == (0, "get")
    assert arguments == CallArguments(0, '{"a": ')
    assert parser.feed('"</tool_call>') == [CallArguments(0, '"</tool_call>')]
    assert parser.feed('"}}\n</tool_call>\n') == [CallArguments(0, '"}')]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "items"),
    [
        # The end comes before the call started, and inside of it.
        ('<tool_call>{"name": "get"', [("text", '<tool_call>{"name": "get"')]),
        ('<tool_call>{"name": "get", "arguments": {"a": [1', [("call", "get", '{"a": [1')]),
        ('<tool_call>{"name": "get", "arguments": {}}\n</tool_', [("call", "get", "{}")]),
        # The outer brace is forgotten, or the marker.
        ('<tool_call>{"name": "get", "arguments": {}\n</tool_call>x', [("call", "get", "{}"), ("text", "x")]),
        ('<tool_call>{"name": "get", "arguments": {}}\nx', [("call", "get", "{}"), ("text", "x")]),
        # No JSON, but its brackets balance.
        ('<tool_call>{"name": "get", "arguments": {a: b}}</tool_call>', [("call", "get", "{a: b}")]),
        ('<tool_call>{"name": "get"}</tool_call>', [("call", "get", "{}")]),
        ('<tool_call><tool_call>{"name": "get"}</tool_call>', [("text", "<tool_call>"), ("call", "get", "{}")]),
    ],
)  # fmt: skip
def test_what_is_malformed(text: str, items: Items) -> None:
    assert parse(HERMES, text) == items
    assert items_of(pieces_of(HERMES, list(text))) == items


@given(hermes_answers(), st.data())
def test_an_end_anywhere_leaves_what_a_client_has_seen(answer: tuple[str, Items], data: st.DataObject) -> None:
    """Of a cut answer all but the last item is as in the whole, and arguments of the last call are their beginning."""
    text, items = answer
    cut = parse(HERMES, text[: data.draw(st.integers(0, len(text)))])
    calls = [item for item in cut if item[0] == "call"]
    whole = [item for item in items if item[0] == "call"]
    assert calls[:-1] == whole[: len(calls)][:-1]
    if calls:
        assert calls[-1][1] == whole[len(calls) - 1][1] and whole[len(calls) - 1][2].startswith(calls[-1][2])
