"""The load tool's HTTP client against a scripted server: what it times, and what it counts as failed."""

import asyncio
import json
from typing import Any

import pytest

from engine.errors import StartupError
from server.bench.client import ClientOptions
from server.bench.endpoints import ChatEndpoint, CompletionEndpoint, Endpoint, Prompt
from server.bench.http_client import HttpClient
from server.bench.load import ClosedLoop, Level, OpenLoop, Runner
from server.bench.recording import Recording, Unit
from server.bench.stream import EventParser
from server.bench.summary import percentiles, summarize, unit_of
from tests.server.bench_server import (
    DONE,
    HEAD,
    STREAM,
    Clock,
    Script,
    ScriptedServer,
    event,
    finish,
    running,
    status,
    text,
    usage,
)
from tests.server.conftest import within

PROMPT = Prompt("hi", 3, 7)


def client_of(server: ScriptedServer, clock: Clock, endpoint: Endpoint | None = None, **more: Any) -> HttpClient:
    options = ClientOptions(**{"model": "tiny", "timeout": 30.0, **more})
    return HttpClient(server.url, endpoint or CompletionEndpoint(), clock, options)


async def record(*script: tuple[float, bytes], **more: Any) -> Recording:
    """What the client records of one answer."""
    clock = Clock()
    async with running(ScriptedServer(script, clock=clock)) as server:
        client = client_of(server, clock, **more)
        recording = Recording(PROMPT.num_tokens)
        await within(Runner(client, clock, max_seconds=30, seed=0).record(PROMPT, recording))
        await client.close()
        return recording


async def test_times_are_those_of_the_script() -> None:
    recording = await record(
        (0.5, STREAM + text("a")),
        (0.25, text("b")),
        (0.125, text("c")),
        (1.0, finish()),
        (2.0, usage(5, 3, cached=2) + DONE),
    )
    assert recording.failure is None
    assert recording.time_to_first_token == 0.5
    assert recording.intervals(Unit.TOKEN) == [0.25, 0.125]
    assert recording.last - recording.sent == 3.875
    assert (recording.num_prompt_tokens, recording.num_output_tokens) == (5, 3)


async def test_a_chunk_of_known_tokens_is_that_many_intervals() -> None:
    recording = await record(
        (0.5, STREAM + text("ab", token_ids=[1, 2])),
        (0.75, text("cde", token_ids=[3, 4, 5])),
        (0.5, text("f", token_ids=[6])),
        (0, finish() + usage(5, 6) + DONE),
    )
    assert recording.intervals(Unit.TOKEN) == [0.25, 0.25, 0.25, 0.5]
    assert recording.intervals(Unit.CHUNK) == [0.75, 0.5]


async def test_usage_with_each_chunk_tells_its_tokens() -> None:
    def chunk(content: str, generated: int) -> bytes:
        counts = {"prompt_tokens": 5, "completion_tokens": generated}
        return event({"choices": [{"text": content, "finish_reason": None}], "usage": counts})

    recording = await record(
        (0.5, STREAM + chunk("a", 1)), (0.5, chunk("bc", 3)), (0, finish() + usage(5, 3) + DONE)
    )  # fmt: skip
    assert recording.intervals(Unit.TOKEN) == [0.25, 0.25]


async def test_unknown_tokens_leave_chunks() -> None:
    recording = await record((0.5, STREAM + text("ab")), (0.5, text("c")), (0, finish() + usage(5, 3) + DONE))
    assert recording.tokens_per_chunk is None
    level = Level(ClosedLoop(1), 1, [recording])
    assert unit_of([level]) is Unit.CHUNK
    assert summarize(level, Unit.CHUNK).interval == percentiles([0.5])


async def test_events_that_arrive_in_pieces() -> None:
    """Cut inside a field name, inside a character, and between the two newlines; with comments and carriage returns."""
    whole = b": ping\r\n\r\n" + json.dumps("é", ensure_ascii=False).encode().join(
        [b'data: {"choices":[{"text":', b"}]}"]
    )
    whole += b"\r\n\r\nid: 4\n" + finish() + DONE
    for cut in range(1, len(whole)):
        parser = EventParser()
        events = [*parser.feed(whole[:cut]), *parser.feed(whole[cut:]), *parser.close()]
        assert [json.loads(data)["choices"][0]["text"] for data in events[:-1]] == ["é", ""]
        assert events[-1] == b"[DONE]"


async def test_a_last_event_without_its_empty_line_counts() -> None:
    assert (await record((0.5, STREAM + text("a") + finish() + b"data: [DONE]"))).failure is None


async def test_chat_counts_from_the_first_text() -> None:
    def delta(**fields: str) -> bytes:
        return event({"choices": [{"delta": fields, "finish_reason": None}]})

    end = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    recording = await record(
        (0.5, STREAM + delta(role="assistant", content="")),
        (0.5, delta(reasoning_content="so")),
        (0.5, delta(content="a")),
        (0.5, end + DONE),
        endpoint=ChatEndpoint(),
    )
    assert recording.failure is None
    assert recording.time_to_first_token == 1.0
    assert recording.intervals(Unit.CHUNK) == [0.5]


async def test_an_answer_without_text_has_its_end_as_first_token() -> None:
    recording = await record((0.5, STREAM + finish() + usage(5, 3) + DONE))
    assert recording.failure is None
    assert recording.time_to_first_token == 0.5


ERROR = json.dumps({"error": {"message": "the step failed", "type": "server_error"}}).encode()
FAILURES: dict[str, tuple[Script, str]] = {
    "error event": ([(0, STREAM + text("a") + b"data: " + ERROR + b"\n\n")], "error event: the step failed"),
    "error as text": ([(0, STREAM + event({"error": "boom"}))], "error event: boom"),
    "object error": (
        [(0, STREAM + event({"object": "error", "message": "boom"}) + DONE)],
        "error event: boom",
    ),
    "no finish": ([(0, STREAM + text("a") + DONE)], "the stream ended without finish_reason"),
    "no DONE": ([(0, STREAM + text("a") + finish())], "the stream ended without [DONE]"),
    "aborted": ([(0, STREAM + text("a") + finish("abort") + DONE)], "finish_reason abort"),
    "cut off": (
        [(0, HEAD + b"content-length: 9999\r\n\r\n" + text("a") + finish() + DONE)],
        "the connection was lost",
    ),
    "bad chunks": ([(0, HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n")], "the answer is not HTTP"),
    "429": ([(0, status(429, ERROR))], "HTTP 429: the step failed"),
    "503": ([(0, status(503, b"<html>"))], "HTTP 503"),
    "whole answer": ([(0, status(200, ERROR))], "the answer is not an event stream: the step failed"),
    "not JSON": ([(0, STREAM + b"data: {nope\n\n")], "an event is not JSON"),
    "not UTF-8": ([(0, STREAM + b'data: {"a": "\xff"}\n\n')], "an event is not JSON"),
    "not an object": ([(0, STREAM + b"data: [1]\n\n")], "an event is not a JSON object"),
    "too deep": ([(0, STREAM + b"data: " + b"[" * 200_000 + b"\n\n")], "an event is not JSON"),
    "odd shapes": (
        [(0, STREAM + event({"choices": 5, "usage": 7}) + event({"choices": [None]}) + event({}) + DONE)],
        "the stream ended without finish_reason",
    ),
    "nothing": ([(0, b"")], "the connection was lost"),
    "not HTTP": ([(0, b"220 smtp ready\r\n\r\n")], "the answer is not HTTP"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_failures(name: str) -> None:
    script, reason = FAILURES[name]
    async with running(ScriptedServer(script)) as server:
        client = client_of(server, Clock())
        recording = Recording(None)
        await within(Runner(client, Clock(), max_seconds=30, seed=0).record(PROMPT, recording))
        await client.close()
    assert str(recording.failure) == reason
    assert not recording.is_done


async def test_a_failure_does_not_end_the_level() -> None:
    good = [(0.0, STREAM + text("a") + finish() + usage(5, 1) + DONE)]
    async with running(ScriptedServer([(0, status(429))], good, [(0, status(503))], good)) as server:
        client = client_of(server, Clock())
        level = Level(ClosedLoop(1), 5)
        await within(Runner(client, Clock(), max_seconds=30, seed=0).run(level, [PROMPT] * 5))
        await client.close()
    summary = summarize(level, Unit.TOKEN)
    assert (summary.num_done, summary.failures) == (3, {"HTTP 429": 1, "HTTP 503": 1})


@pytest.mark.parametrize(("load", "num_sent"), [(ClosedLoop(2), 2), (OpenLoop(1e6), 4)])
async def test_what_runs_at_the_bound_is_abandoned(load: Any, num_sent: int) -> None:
    """A closed loop sends no third request while two hang; an open one sends all."""
    async with running(ScriptedServer([])) as server:
        client = client_of(server, Clock())
        level = Level(load, 4)
        await within(Runner(client, Clock(), max_seconds=0.3, seed=0).run(level, [PROMPT] * 4))
        await client.close()
    summary = summarize(level, Unit.TOKEN)
    assert (summary.num_done, summary.num_failed, summary.num_abandoned) == (0, 0, num_sent)


async def test_a_request_that_takes_too_long_fails() -> None:
    async with running(ScriptedServer([])) as server:
        client = client_of(server, Clock(), timeout=0.05)
        recording = Recording(None)
        await within(Runner(client, Clock(), max_seconds=30, seed=0).record(PROMPT, recording))
        await client.close()
    assert str(recording.failure) == "timeout"


@pytest.mark.parametrize(
    ("models", "says"),
    [
        (status(404), "404; name the model by --model"),
        (status(401, b'{"error": {"message": "no key"}}'), "401 no key"),
        (status(200, b'{"data": []}'), "answers no model"),
        (status(200, b"[[["), "answers no model"),
        (b"220 smtp ready\r\n\r\n", "not HTTP"),
    ],
)
async def test_a_server_without_a_model_is_told_in_one_line(models: bytes, says: str) -> None:
    async with running(ScriptedServer([], models=models)) as server:
        client = client_of(server, Clock(), model=None)
        with pytest.raises(StartupError, match=says) as caught:
            await within(client.connect())
        await client.close()
    assert "\n" not in str(caught.value)


async def test_what_a_request_says() -> None:
    script = [(0.0, STREAM + finish() + DONE)]
    async with running(ScriptedServer(script)) as server:
        client = client_of(server, Clock(), model=None, api_key="s3cret")
        await within(client.connect())
        await within(client.generate(PROMPT, Recording(None)))
        plain = client_of(server, Clock(), endpoint=ChatEndpoint(), model="other", ignore_eos=False)
        await within(asyncio.gather(plain.connect(), plain.generate(PROMPT, Recording(None))))
        await asyncio.gather(client.close(), plain.close())
    fixed = {"max_tokens": 3, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies == [
        {"model": "tiny", "prompt": "hi", "ignore_eos": True, **fixed},
        {"model": "other", "messages": [{"role": "user", "content": "hi"}], **fixed},
    ]
    assert "Bearer s3cret" in server.heads[0]
    assert "uthorization" not in server.heads[1]
