"""`n`: which choice is which, seeds, usage, interleavings, and how a call of several choices ends."""

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import httpx
import pytest

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Finished, FinishReason, Request, Usage
from proto.quire.v1 import inference_pb2 as pb
from tests.fakes import FakeEngine, Script, fail_after, hang_after
from tests.server.conftest import Running, Web, within
from tests.server.wire import BODIES, CHAT, COMPLETION, MESSAGES, chunks_of, read_chunked, send

SEED = 2**64 - 2
SEEDS = [2**64 - 2, 2**64 - 1, 0]
TWO_PROMPTS = {**COMPLETION, "prompt": [[1, 2], [3, 4, 5]], "n": 3}


def place(request: Request) -> int:
    """The place of a request in its call: choices are numbered in order of submission."""
    return int(request.id.rsplit("-", 1)[1])


async def name_itself(request: Request) -> AsyncIterator[Event]:
    yield Delta(f"{list(request.prompt)} ", (1,))
    yield Delta(str(request.sampling.seed), (2,))
    yield Finished(FinishReason.STOP, Usage(len(request.prompt), 0, 2))


async def count_differently(request: Request) -> AsyncIterator[Event]:
    """Choice i generates i + 1 tokens; all but the first of a prompt find the whole prompt cached."""
    cached = 1 if place(request) % 3 == 0 else len(request.prompt)
    yield Finished(FinishReason.LENGTH, Usage(len(request.prompt), cached, place(request) + 1))


def in_turns(order: Sequence[int]) -> Script:
    """Each occurrence of a place in `order` is the next event of that choice, its last one the end."""
    turns = deque(order)
    turn_taken = asyncio.Condition()

    async def script(request: Request) -> AsyncIterator[Event]:
        mine = place(request)
        for left in reversed(range(order.count(mine))):
            async with turn_taken:
                await turn_taken.wait_for(lambda: turns[0] == mine)
                turns.popleft()
                turn_taken.notify_all()
            if left:
                yield Delta(f"{mine}.{left} ", (left,))
            else:
                yield Finished(FinishReason.STOP, Usage(len(request.prompt), 0, 1))

    return script


def orders() -> list[list[int]]:
    """Three choices with 1, 4 and 3 events: each after the other both ways, and mixed."""
    events = [0] + [1] * 4 + [2] * 3
    return [events, events[::-1], *(random.Random(seed).sample(events, len(events)) for seed in range(3))]


async def test_choices_are_prompt_by_prompt_with_a_seed_each(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = name_itself
    answer = (await client.post("/v1/completions", json={**TWO_PROMPTS, "seed": SEED})).json()
    expected = [f"{prompt} {seed}" for prompt in ([1, 2], [3, 4, 5]) for seed in SEEDS]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(expected))
    assert [len(fork) for fork in engine.forks] == [3, 3]  # so that the engine computes each prompt once
    streamed = await client.post("/v1/completions", json={**TWO_PROMPTS, "seed": SEED, "stream": True})
    texts = [""] * 6
    for chunk in chunks_of(streamed.content):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == expected
    assert len({request.id for request in engine.requests}) == 12


async def test_chat_choices(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = name_itself
    answer = (await client.post("/v1/chat/completions", json={**CHAT, "n": 3, "seed": SEED})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"].split()[-1] for choice in answer["choices"]] == [str(s) for s in SEEDS]


async def test_siblings_of_an_unseeded_request_differ(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post("/v1/completions", json=TWO_PROMPTS)
    firsts = []
    for fork in engine.forks:
        first, *others = [request.sampling.seed for request in fork]
        assert others == [(first + 1) % 2**64, (first + 2) % 2**64]
        firsts.append(first)
    assert abs(firsts[0] - firsts[1]) > 2  # else a choice of one prompt would repeat the luck of another's


async def test_usage_counts_each_prompt_once(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = count_differently
    expected = {
        "prompt_tokens": 2 + 3,
        "completion_tokens": 1 + 2 + 3 + 4 + 5 + 6,
        "total_tokens": 5 + 21,
        "prompt_tokens_details": {"cached_tokens": 1 + 1},
    }
    whole = await client.post("/v1/completions", json=TWO_PROMPTS)
    assert whole.json()["usage"] == expected
    body = {**TWO_PROMPTS, "stream": True, "stream_options": {"include_usage": True}}
    assert chunks_of((await client.post("/v1/completions", json=body)).content)[-1]["usage"] == expected


@pytest.mark.parametrize("order", orders(), ids=str)
async def test_streams_of_choices_interleave(client: httpx.AsyncClient, engine: FakeEngine, order: list[int]) -> None:
    engine.script = in_turns(order)
    response = await within(client.post("/v1/chat/completions", json={**CHAT, "n": 3, "stream": True}))
    choices = [choice for chunk in chunks_of(response.content) for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"].get("role")) for choice in choices[:3]] == [
        (index, "assistant") for index in range(3)
    ]
    for index in range(3):
        *deltas, end = [choice for choice in choices[3:] if choice["index"] == index]
        assert [choice["delta"]["content"] for choice in deltas] == [
            f"{index}.{left} " for left in range(order.count(index) - 1, 0, -1)
        ]
        assert {choice["finish_reason"] for choice in deltas} <= {None}
        assert (end["delta"], end["finish_reason"]) == ({}, "stop")


async def test_the_openai_client_puts_interleaved_choices_together(web: Web) -> None:
    web.engine.script = in_turns(orders()[-1])
    async with web.openai.chat.completions.stream(model="tiny", messages=MESSAGES, n=3) as helper:
        final = await within(helper.get_final_completion())
    contents = [choice.message.content for choice in final.choices]
    assert contents == ["", "1.3 1.2 1.1 ", "2.2 2.1 "]


@pytest.mark.parametrize("order", orders(), ids=str)
async def test_grpc_messages_of_choices_interleave(running: Running, order: list[int]) -> None:
    running.engine.script = in_turns(order)
    call = running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi", n=3), timeout=5)
    messages = [message async for message in call]
    for index in range(3):
        *deltas, last = [message for message in messages if message.index == index]
        expected = [f"{index}.{left} " for left in range(order.count(index) - 1, 0, -1)]
        assert "".join(message.text for message in deltas) == "".join(expected)
        assert [message.HasField("finish") for message in (*deltas, last)] == [False] * len(deltas) + [True]


async def test_grpc_usage_is_that_of_each_choice(running: Running) -> None:
    running.engine.script = count_differently
    request = pb.GenerateRequest(model="tiny", token_ids=pb.TokenIds(ids=[1, 2]), n=3)
    usages = {m.index: m.finish.usage async for m in running.stub.Generate(request)}
    assert usages == {
        0: pb.Usage(prompt_tokens=2, cached_tokens=1, generated_tokens=1),
        1: pb.Usage(prompt_tokens=2, cached_tokens=2, generated_tokens=2),
        2: pb.Usage(prompt_tokens=2, cached_tokens=2, generated_tokens=3),
    }


async def test_a_grpc_client_of_one_choice_sees_the_bytes_it_always_saw(running: Running) -> None:
    sampling = pb.SamplingParams(max_tokens=1)
    messages = [m async for m in running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi", sampling=sampling))]
    assert messages[0].SerializeToString() == b"\x0a\x01H\x12\x01\x01"  # field 1, "H"; field 2, ids [1]
    assert {message.index for message in messages} == {0}


async def test_the_engine_gets_the_same_fork_over_either_protocol(running: Running, web: Web) -> None:
    fields: dict[str, Any] = {"n": 3, "priority": -(2**31), "kv_shrink": "streaming:recent=4"}
    message = pb.GenerateRequest(model="tiny", text="hé", sampling=pb.SamplingParams(seed=SEED), **fields)
    _ = [m async for m in running.stub.Generate(message)]
    async with httpx.AsyncClient(base_url=web.url) as client:
        await client.post("/v1/completions", json={**COMPLETION, "prompt": "hé", "seed": SEED, **fields})
    ours, theirs = (
        [(r.prompt, r.sampling, r.priority, r.salt, r.shrink) for r in fork] for fork in running.engine.forks
    )
    assert ours == theirs
    assert [request.sampling.seed for request in running.engine.forks[0]] == SEEDS
    assert {request.priority for request in running.engine.requests} == {-(2**31)}


@pytest.mark.parametrize("n", [1, 4, None])
async def test_as_many_as_run_at_once_are_accepted(client: httpx.AsyncClient, engine: FakeEngine, n: int) -> None:
    assert (await client.post("/v1/completions", json={**COMPLETION, "n": n})).status_code == 200
    assert len(engine.requests) == (n or 1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 0}, "n"), ({"n": 5}, "n"), ({"n": 2**32 - 1}, "n"), ({"kv_shrink": ""}, "kv_shrink"),
     ({"kv_shrink": "h2o"}, "kv_shrink")],
)  # fmt: skip
async def test_grpc_refusals(running: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [m async for m in running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi", **fields))]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["error-param"] == param
    assert running.engine.forks == []


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_every_choice(web: Web, route: str, stream: bool) -> None:
    web.engine.script = hang_after(1)
    _, writer = await send(web, route, {**BODIES[route], "n": 3, "stream": stream})
    await within(web.engine.saw_submit.wait())
    writer.close()
    await within(web.service.wait_idle())
    assert sorted(web.engine.cancelled) == [request.id for request in web.engine.requests]
    assert len(web.engine.cancelled) == 3


async def test_a_cancelled_grpc_call_cancels_every_choice(running: Running) -> None:
    running.engine.script = hang_after(1)
    call = running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi", n=3))
    await within(call.read())
    call.cancel()
    await within(running.engine.saw_cancel.wait())
    await within(running.service.wait_idle())
    assert sorted(running.engine.cancelled) == [request.id for request in running.engine.requests]
    assert len(running.engine.cancelled) == 3


def second_fails(request: Request) -> AsyncIterator[Event]:
    error = RequestError(ErrorKind.INTERNAL, "the step failed", code="internal_error")
    return (fail_after(1, error) if place(request) == 1 else hang_after(1))(request)


async def test_a_failing_choice_fails_the_call(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = second_fails
    response = await within(client.post("/v1/completions", json={**COMPLETION, "n": 3}))
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the step failed")
    assert sorted(engine.cancelled) == [engine.requests[0].id, engine.requests[2].id]


async def test_a_failing_choice_breaks_the_stream(web: Web) -> None:
    web.engine.script = second_fails
    reader, writer = await send(web, "/v1/chat/completions", {**CHAT, "n": 3, "stream": True})
    _, body, is_complete = await read_chunked(reader)
    writer.close()
    assert not is_complete and b"[DONE]" not in body
    assert json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "internal_error"


async def test_a_failing_choice_fails_the_grpc_call(running: Running) -> None:
    running.engine.script = second_fails
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [m async for m in running.stub.Generate(pb.GenerateRequest(model="tiny", text="hi", n=3), timeout=5)]
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_refused_fork_ends_those_before_it(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine.submit

    def once(requests: Sequence[Request], sinks: Any) -> None:
        if engine.forks:
            raise RequestError(ErrorKind.OVERLOADED, "no room")
        submit(requests, sinks)

    monkeypatch.setattr(engine, "submit", once)
    engine.script = hang_after(1)
    response = await within(client.post("/v1/completions", json=TWO_PROMPTS))
    assert (response.status_code, response.json()["error"]["message"]) == (429, "no room")
    assert sorted(engine.cancelled) == [request.id for request in engine.forks[0]]
    assert len(engine.forks) == 1 and len(engine.cancelled) == 3


async def test_a_choice_that_the_engine_cancels_alone_fails_the_call(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    async def last_is_cancelled(request: Request) -> AsyncIterator[Event]:
        reason = FinishReason.CANCELLED if place(request) == 2 else FinishReason.STOP
        yield Finished(reason, Usage(1, 0, 0))

    engine.script = last_is_cancelled
    assert (await client.post("/v1/completions", json={**COMPLETION, "n": 3})).status_code == 499
