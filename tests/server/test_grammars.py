"""Answers held by a JSON schema: every token that is allowed leads to what was asked for."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from engine.request import Finished, FinishReason
from engine.tokenizer import Tokenizer
from server.structured.grammars import Grammars
from server.structured.texts import json_object, json_schema
from tests.helpers import byte_tokenizer, greedy, random_prompt, run, tiny_core
from tests.server.answers import END, Compile, allowed, can_take, compiler, take

Json = dict[str, Any]


@pytest.fixture(scope="module")
def compile() -> Iterator[Compile]:
    with compiler() as function:
        yield function


scalars = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": "number"}, {"type": "integer"}]),
    st.tuples(st.integers(-200, 200), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 5)).map(
        lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[0] + pair[1]}
    ),
    st.sampled_from(["^[a-f]{2,4}$", "^(ab|cd)+$", '^"\\d+\\\\$', "é"]).map(lambda p: {"type": "string", "pattern": p}),
    st.lists(st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3)), min_size=1, max_size=4).map(
        lambda values: {"enum": values}
    ),
    st.text(max_size=4).map(lambda value: {"const": value}),
    st.just({"$ref": "#/$defs/shared"}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Json]) -> Json:
    properties = draw(st.dictionaries(st.text(max_size=3), inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    rest = draw(st.sampled_from([False, True, {"type": "integer"}]))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": rest}


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[1] + t[2]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=5,
)


def satisfies(text: str, schema: Json) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(schemas, st.randoms(use_true_random=False))
def test_any_walk_ends_in_what_the_schema_allows(compile: Compile, schema: Json, rng: random.Random) -> None:
    """And may end exactly where what is there already is."""
    schema = schema | {"$defs": {"shared": {"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": 2}}}
    answer, tokenizer, data = compile(json_schema(schema)).start(), byte_tokenizer(), b""
    closers = [next(id for id in range(256) if tokenizer.token_bytes(id) == char) for char in (b'"', b"]", b"}")]
    for number in range(600):
        tokens = allowed(answer)
        text = data.decode(errors="replace")
        assert (END in tokens) == satisfies(text, schema), text
        assert answer.is_complete == (tokens == {END})
        if END in tokens and (answer.is_complete or rng.random() < 0.3 or number > 80):
            return
        # After a while what closes, so that most walks end.
        token = next((token for token in closers if token in tokens and number > 80), None)
        token = rng.choice(sorted(tokens - {END})) if token is None else token
        answer.accept(token)
        data += tokenizer.token_bytes(token)


def byte_level_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<|end|>", '"a'], initial_alphabet=alphabet)
    backend.train_from_iterator(['{"name": "München", "value": 12345}', '["abc", "abd", -12]'] * 3, trainer)
    backend.add_tokens(["<tool_call>", '"ab'])
    return Tokenizer(backend, None)


def sentencepiece_tokenizer() -> Tokenizer:
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        '▁"',
        '"',
        "a",
        "ab",
        '"ab',
        "▁ab",
        "c",
    ]
    pieces += ["ü", "n", "ün", "1", "2", "12", "123", "3", "M", "Mün", "en", "[", "]", ",", ',▁"']
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<unk>", special=True)])
    return Tokenizer(backend, None)


VALUES = ["abc", "abd", "München", 'say "x"', 1, 12, 123, -12, None]
TEXTS = [json.dumps(value, ensure_ascii=False).encode() for value in VALUES]


async def test_an_end_that_is_plain_text_is_no_part_of_a_string() -> None:
    """To their tokenizer the end of some models is not special; in a string it would end the answer there."""
    tokenizer = byte_level_tokenizer()
    (end,) = tokenizer.encode("<tool_call>")
    grammars = Grammars(tokenizer, {end}, tokenizer.vocab_size)
    answer = (await grammars.compile(json_schema({"type": "string"}))).start()
    await grammars.close()
    answer.accept(tokenizer.encode('"')[0])
    assert end not in allowed(answer, tokenizer.vocab_size)
    answer.accept(tokenizer.encode('"')[0])
    assert allowed(answer, tokenizer.vocab_size) == {end}


@pytest.mark.parametrize("padding", [-40, 0, 77])
@pytest.mark.parametrize("source", [byte_level_tokenizer, sentencepiece_tokenizer])
async def test_the_tokens_allowed_are_those_whose_bytes_go_on(source: Callable[[], Tokenizer], padding: int) -> None:
    """All of the vocabulary, against the bytes of every text there is. The logits have more entries, or fewer."""
    tokenizer = source()
    vocab, end = tokenizer.vocab_size + padding, min(tokenizer.special_ids)
    grammars = Grammars(tokenizer, {end, 10**6}, vocab)
    grammar = await grammars.compile(json_schema({"enum": VALUES}))
    await grammars.close()
    rng = random.Random(padding)
    texts = [id for id in range(vocab) if id not in tokenizer.special_ids and tokenizer.token_bytes(id)]
    for _ in range(20):
        answer, data = grammar.start(), b""
        while not answer.is_complete:
            tokens = allowed(answer, vocab)
            expected = {id for id in texts if any(t.startswith(data + tokenizer.token_bytes(id)) for t in TEXTS)}
            assert tokens == expected | ({end} if data in TEXTS else set())
            token = rng.choice(sorted(tokens - {end}) or [end])
            answer.accept(token)
            data += b"" if token == end else tokenizer.token_bytes(token)
        assert data in TEXTS


def test_objects_of_any_kind(compile: Compile) -> None:
    for text in ["{}", "{ }", '{"a": [1, -2.5e3, true, null, {"b": "x \\" \\u0001 é"}]}']:
        answer = compile(json_object()).start()
        take(answer, text)
        assert answer.is_complete
    for text in ["[", "1", '"', " ", '{"a":1,}', "{a", '{"a":01', '{"a":"\n', '{"a":NaN', "{'"]:
        assert not can_take(compile(json_object()).start(), text), text


@pytest.mark.parametrize("guidance", [{}, {"x-guidance": {"whitespace_pattern": "[ \\n]+", "lenient": True}}])
def test_a_model_that_loves_blanks_must_go_on(compile: Compile, guidance: Json) -> None:
    """At most one space, and no other white space, whatever the client says about it."""
    answer, tokenizer, text = compile(json_schema({"type": "object"} | guidance)).start(), byte_tokenizer(), ""
    blanks = {id for id in range(256) if tokenizer.token_bytes(id).isspace()}
    rng = random.Random(1)
    for _ in range(200):
        tokens = allowed(answer) - {END}
        inside = text.count('"') % 2 and "\\" not in text
        if inside:  # leave the string
            token = next(id for id in tokens if tokenizer.token_bytes(id) == b'"')
        else:
            token = rng.choice(sorted(tokens & blanks or tokens))
        answer.accept(token)
        text += tokenizer.token_bytes(token).decode()
        assert not text.endswith("  ") and "\n" not in text and "\t" not in text
        if answer.is_complete:
            break
    assert " " in text


@pytest.mark.parametrize("ends", [(), (10**9,)])
async def test_without_an_end_of_sequence_an_answer_ends(ends: tuple[int, ...]) -> None:
    grammars = Grammars(byte_tokenizer(), ends, 256)
    answer = (await grammars.compile(json_object())).start()
    await grammars.close()
    take_tokens = byte_tokenizer().encode('{"a":1}')
    for token in take_tokens:
        assert not answer.is_complete and token in allowed(answer, 256)
        answer.accept(token)
    assert answer.is_complete


def test_an_end_that_is_ignored_completes(compile: Compile) -> None:
    """With `ignore_eos` the engine hands it on like any token."""
    answer = compile(json_schema({"type": "integer"})).start()
    take(answer, "12")
    assert END in allowed(answer) and not answer.is_complete
    answer.accept(END)
    assert answer.is_complete


def test_answers_of_a_grammar_do_not_share_their_place(compile: Compile) -> None:
    grammar = compile(json_schema({"enum": ["ab", "cd"]}))
    first, second, third = grammar.start(), grammar.start(), grammar.start()
    take(first, '"a')
    take(second, '"c')
    with pytest.raises(RuntimeError):
        second.accept(byte_tokenizer().encode("x")[0])
    take(first, 'b"')
    take(third, '"cd"')
    assert first.is_complete and third.is_complete
    with pytest.raises(RuntimeError):
        second.fill_mask(np.zeros(10, np.int32).data)


@pytest.mark.parametrize("ignore_eos", [True, False])
async def test_the_engine_writes_what_the_schema_asks_for(ignore_eos: bool) -> None:
    """A random model at a high temperature. Its end of sequence is the first of its tokens."""
    schema = {
        "type": "object",
        "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}, "color": {"enum": ["red", "blue"]}},
        "required": ["size", "color"],
        "additionalProperties": False,
    }
    grammars = Grammars(byte_tokenizer(), {0}, 256)
    grammar = await grammars.compile(json_schema(schema))
    await grammars.close()
    prompt = random_prompt(1, 40)
    requests = [greedy(str(seed), prompt, 80, temperature=1.5, seed=seed, ignore_eos=ignore_eos) for seed in range(4)]
    recorders = run(tiny_core(), [replace(request, grammar=grammar) for request in requests])
    for recorder in recorders:
        assert isinstance(recorder.terminal, Finished) and recorder.terminal.reason is FinishReason.STOP
        jsonschema.validate(json.loads(recorder.text), schema)
    assert len({recorder.text for recorder in recorders}) > 1
