"""Schemas that cannot be compiled are refused without harm to anyone else."""

import asyncio
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from engine.errors import ErrorKind, RequestError
from server.structured.grammars import MAX_AT_ONCE, Grammars
from server.structured.texts import json_object, json_schema
from server.structured.trials import Trials, _start
from tests.helpers import byte_tokenizer
from tests.server.answers import END, VOCAB, Compile, allowed, compiler, take

Json = dict[str, Any]


@pytest.fixture(scope="module")
def compile() -> Iterator[Compile]:
    with compiler() as function:
        yield function


REFUSED: dict[str, object] = {
    "no object": [1],
    "no schema": {"type": "nope"},
    "no pattern": {"pattern": "(", "type": "string"},
    "many parentheses": {"pattern": "(" * 20000 + "a" + ")" * 20000, "type": "string"},
    "look-ahead": {"pattern": "(?=a)", "type": "string"},
    "not implemented": {"not": {}},
    "no value": {"type": "string", "minLength": 5, "maxLength": 2},
    "itself": {"$ref": "#"},
    "itself and more": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}, "$ref": "#/$defs/a"},
    "nowhere": {"$ref": "#/$defs/none"},
    "a file": {"$ref": "file:///etc/passwd"},
    "too large": {"enum": ["x" * 2**16]},
    "too deep": json.loads('{"items":' * 70 + "{}" + "}" * 70),
    "too many properties": {"properties": {f"p{number}": {} for number in range(2100)}, "type": "object"},
    "combinations": {"allOf": [{"anyOf": [{"required": [f"a{n}"]}, {"required": [f"b{n}"]}]} for n in range(25)]},
    "not a number": {"minimum": float("nan")},
    "a huge number": {"minimum": 10**4000},
    "half a character": {"const": "\ud800"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_told_briefly_and_the_next_one_works(compile: Compile, name: str) -> None:
    """A malformed grammar after a valid one, and a valid one after it."""
    with pytest.raises(RequestError) as raised:
        compile(json_schema(REFUSED[name]))
    error = raised.value
    assert (error.kind, error.param, error.code) == (ErrorKind.INVALID, "response_format", "invalid_schema")
    assert len(error.message) < 260 and "\n" not in error.message
    take(compile(json_schema({"type": "string", "pattern": "^foo**$"})).start(), '"fooo"')


def test_a_remote_reference_is_refused_without_a_connection(compile: Compile) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        with pytest.raises(RequestError, match="cannot be used"):
            compile(json_schema({"$ref": f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"}))
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value{number:05}" for number in range(4000)]},
        {"type": "string", "pattern": "^(((a+)+)+)+$"},
        {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"},
        {"type": "string", "pattern": "^(a|b)*a(a|b){200}$"},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    ],
)  # fmt: skip
def test_what_looks_heavy_and_is_not(compile: Compile, schema: Json) -> None:
    answer, rng, count = compile(json_schema(schema)).start(), random.Random(0), 0
    while count < 60 and (tokens := allowed(answer) - {END}):
        answer.accept(rng.choice(sorted(tokens)))
        count += 1
    assert count == 60 or answer.is_complete


def lark_of(schema: Json) -> str:
    return json_schema(schema).lark


async def test_what_takes_too_long_is_killed_and_the_next_one_works() -> None:
    trials = Trials(max_seconds=0.6)
    assert await trials.error_of(lark_of({"type": "integer"})) is None
    (first,) = trials._idle
    error = await trials.error_of(lark_of({"type": "integer", "multipleOf": 299_993}))
    assert error is not None and "simplify" in error
    assert await first.wait() < 0 and not trials._idle
    assert await trials.error_of(lark_of({"type": "number"})) is None
    await trials.close()


async def test_what_takes_too_much_memory_is_refused() -> None:
    trials = Trials(max_seconds=60)
    patterns = [{"type": "string", "pattern": f"a.{{0,100}}{number}"} for number in range(60)]
    error = await trials.error_of(lark_of({"allOf": patterns}))
    assert error is not None and "MiB" in error
    assert not trials._idle


async def test_processes_are_few_and_end() -> None:
    """The event loop goes on meanwhile."""
    grammars = Grammars(byte_tokenizer(), {END}, VOCAB)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.001)
            turns += 1

    counting = asyncio.create_task(count())
    texts = [json_schema({"type": "integer", "multipleOf": 20_000 + number}) for number in range(8)]
    await asyncio.gather(*(grammars.compile(text) for text in texts))
    counting.cancel()
    processes = list(grammars._trials._idle)
    assert len(processes) == MAX_AT_ONCE and turns > 20
    await grammars.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


async def test_a_process_ends_with_its_input_whatever_it_is_at() -> None:
    """As when the server is killed."""
    process = await _start()
    assert process.stdin and process.stdout
    heavy = lark_of({"allOf": [{"type": "string", "pattern": f"a.{{0,100}}{number}"} for number in range(30)]})
    for text in (lark_of({"type": "integer"}), heavy):
        process.stdin.write(json.dumps(text).encode() + b"\n")
    assert await process.stdout.readline() == b"null\n"  # it is at the heavy one now
    process.stdin.close()
    async with asyncio.timeout(10):
        assert await process.wait() == 0


async def test_a_request_that_leaves_takes_its_process_along() -> None:
    grammars = Grammars(byte_tokenizer(), {END}, VOCAB)
    heavy = json_schema({"type": "integer", "multipleOf": 999_983})
    tasks = [asyncio.create_task(grammars.compile(heavy)) for _ in range(MAX_AT_ONCE)]
    await asyncio.sleep(0.3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not grammars._trials._idle
    await grammars.compile(json_object())
    await grammars.close()


async def test_a_process_that_was_killed_while_idle_fails_nobody() -> None:
    trials = Trials()
    text = json_object().lark
    assert await trials.error_of(text) is None
    for process in trials._idle:
        process.kill()
        await process.wait()
    assert await trials.error_of(text + "\n") is None
    await trials.close()
