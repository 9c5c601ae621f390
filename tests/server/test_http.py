"""Answers over HTTP: shapes, framing byte by byte, failures in mid-stream, and clients that leave."""

import asyncio
import json
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from engine.errors import ErrorKind, RequestError
from engine.request import Finished, FinishReason, Usage
from tests.fakes import FakeEngine, fail_after, hang_after
from tests.server.conftest import Web, within

COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
MESSAGES: Any = CHAT["messages"]


async def send(web: Web, route: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One POST on a connection of its own, so that a test sees every byte and can leave when it wants."""
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    payload = json.dumps(body).encode()
    writer.write(f"POST {route} HTTP/1.1\r\nHost: quire\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    return reader, writer


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bool]:
    """Head, body, and whether the body ended as HTTP says it must (a chunk of length zero)."""
    head = await within(reader.readuntil(b"\r\n\r\n"))
    body = b""
    while size_line := await within(reader.readline()):
        size = int(size_line, 16)
        body += await within(reader.readexactly(size))
        await within(reader.readexactly(2))
        if size == 0:
            return head, body, True
    return head, body, False


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of each event, after checking that nothing else is on the wire."""
    assert re.fullmatch(rb"(data: [^\r\n]+\n\n)+", body), body
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n")[:-1]]
    assert events.pop() == "[DONE]"
    return [json.loads(item) for item in events]


async def test_chat_stream_framing(web: Web) -> None:
    reader, writer = await send(web, "/v1/chat/completions", {**CHAT, "stream": True})
    head, body, is_complete = await read_chunked(reader)
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    for header in (b"content-type: text/event-stream; charset=utf-8", b"cache-control: no-cache",
                   b"x-accel-buffering: no", b"x-request-id: "):  # fmt: skip
        assert b"\r\n" + header in head
    assert is_complete
    chunks = chunks_of(body)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "é"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "llo"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_completion_stream_framing_with_usage(web: Web) -> None:
    body = {**COMPLETION, "stream": True, "max_tokens": 3, "stream_options": {"include_usage": True}}
    reader, writer = await send(web, "/v1/completions", body)
    _, raw, is_complete = await read_chunked(reader)
    writer.close()
    assert is_complete
    *chunks, last = chunks_of(raw)
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("H", None), ("é", None), ("", "length"),
    ]  # fmt: skip
    assert all(chunk["usage"] is None and chunk["object"] == "text_completion" for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_connection_is_reused_after_a_stream(web: Web) -> None:
    reader, writer = await send(web, "/v1/completions", {**COMPLETION, "stream": True})
    await read_chunked(reader)
    writer.write(b"GET /health/live HTTP/1.1\r\nHost: quire\r\n\r\n")
    assert (await within(reader.readline())) == b"HTTP/1.1 200 OK\r\n"
    writer.close()


async def test_whole_answers(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/completions", json=COMPLETION)).json()
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"text": "Héllo", "index": 0, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 4
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Héllo", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.parametrize("prompt", [["a", "bc"], [[1], [2, 3]]])
async def test_several_prompts(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any) -> None:
    whole = (await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt})).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "Héllo"), (1, "Héllo")]
    assert whole["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in engine.requests)
    assert whole["usage"]["completion_tokens"] == 8
    streamed = await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt, "stream": True})
    texts = ["", ""]
    for chunk in chunks_of(streamed.content):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["Héllo", "Héllo"]


async def test_one_failing_prompt_cancels_its_siblings(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: (fail_after(0) if 0 in request.prompt else hang_after(0))(request)
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": [[1], [0]]})
    assert response.status_code == 500
    assert engine.cancelled == [engine.requests[0].id]


async def test_openai_client_streams_and_helper(web: Web) -> None:
    text, usage = "", None
    stream = await web.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Héllo" and usage is not None and usage.completion_tokens == 4
    async with web.openai.chat.completions.stream(model="tiny", messages=MESSAGES) as helper:
        final = await helper.get_final_completion()
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("Héllo", "stop")
    assert final.choices[0].message.role == "assistant"
    whole = await web.openai.completions.create(model="tiny", prompt=["a", "b"])
    assert [choice.text for choice in whole.choices] == ["Héllo", "Héllo"]


async def test_openai_client_sees_the_error_fields(web: Web) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await web.openai.chat.completions.create(model="tiny", messages=MESSAGES, temperature=9, stream=True)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    with pytest.raises(openai.NotFoundError) as missing:
        await web.openai.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("route", BODIES)
async def test_failure_in_mid_stream_is_an_error_event_and_a_broken_body(web: Web, route: str) -> None:
    web.engine.script = fail_after(2)
    reader, writer = await send(web, route, {**BODIES[route], "stream": True})
    head, body, is_complete = await read_chunked(reader)
    writer.close()
    assert head.startswith(b"HTTP/1.1 200") and not is_complete
    assert b"[DONE]" not in body and b'finish_reason":"' not in body
    last = json.loads(body.decode().split("\n\n")[-2].removeprefix("data: "))
    assert last == {
        "error": {"message": "the step failed", "type": "server_error", "param": None, "code": "internal_error"}
    }


async def test_failure_in_mid_stream_raises_in_the_openai_client(web: Web) -> None:
    web.engine.script = fail_after(2)
    stream = await web.openai.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the step failed"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [True, False])
async def test_failure_before_the_first_token_has_its_own_status(client: httpx.AsyncClient, engine: FakeEngine,
                                                                 stream: bool) -> None:  # fmt: skip
    engine.script = fail_after(0, RequestError(ErrorKind.OVERLOADED, "the pool is full", code="pool_full"))
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "pool_full")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_the_engine_cancels_is_not_an_answer(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    async def cancelled(request: Any) -> Any:
        yield Finished(FinishReason.CANCELLED, Usage(1, 0, 0))

    engine.script = cancelled
    response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (499, "cancelled")


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(("stream", "deltas"), [(True, 0), (True, 2), (False, 0), (False, 2)])
async def test_a_client_that_leaves_cancels_its_request(web: Web, route: str, stream: bool, deltas: int) -> None:
    """In the queue or prefill (no event yet) and in decode, streaming or not."""
    web.engine.script = hang_after(deltas)
    reader, writer = await send(web, route, {**BODIES[route], "stream": stream})
    if stream and deltas:
        await within(reader.readuntil(b"t1 "))
    else:
        await within(web.engine.saw_submit.wait())
    writer.close()
    await within(web.engine.saw_cancel.wait())
    assert web.engine.cancelled == [web.engine.requests[0].id]
    await within(web.service.wait_idle())


async def test_a_client_that_leaves_while_sending_submits_nothing(web: Web) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: quire\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    assert len(web.engine.requests) == 1


async def test_a_broken_event_source_is_500_and_ends_the_request(web: Web) -> None:
    async def broken(request: Any) -> Any:
        yield "not an event"

    web.engine.script = broken
    async with httpx.AsyncClient(base_url=web.url) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-should-retry"] == "false" and response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("abc-1.2_X", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("x;y", False), ("", False)],
)
async def test_request_id(client: httpx.AsyncClient, given: str, is_echoed: bool) -> None:
    for route in ("/health/live", "/nowhere"):
        answer = await client.get(route, headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is is_echoed
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", answer.headers["x-request-id"])


async def test_models(client: httpx.AsyncClient) -> None:
    listing = (await client.get("/v1/models")).json()
    assert listing["object"] == "list"
    (model,) = listing["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", 128)
    assert (await client.get("/v1/models/tiny")).json() == model
    missing = await client.get("/v1/models/a/b")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    text = "a é 😀"
    answer = (await client.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == [256, *text.encode()]
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 128
    bare = (await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})).json()
    assert bare["tokens"] == list(text.encode()) and "token_strs" not in bare
    back = (await client.post("/detokenize", json={"tokens": bare["tokens"]})).json()
    assert back == {"prompt": text}
    rendered = (await client.post("/tokenize", json={"messages": CHAT["messages"]})).json()
    assert rendered["tokens"] == [256, *b"<user>hi"]


async def test_health_and_version(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.get("/health/ready")).status_code == 200
    engine.is_ready = False
    assert (await client.get("/health/live")).status_code == 200
    assert (await client.get("/health/ready")).status_code == 503
    refused = await client.post("/v1/completions", json=COMPLETION)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert re.match(r"\d+\.\d+", (await client.get("/version")).json()["version"])


async def test_draining_refuses_new_calls_and_lets_running_ones_finish(web: Web) -> None:
    go_on = asyncio.Event()

    async def waits(request: Any) -> Any:
        await go_on.wait()
        yield Finished(FinishReason.STOP, Usage(1, 0, 0))

    web.engine.script = waits
    async with httpx.AsyncClient(base_url=web.url) as client:
        running_call = asyncio.create_task(client.post("/v1/completions", json=COMPLETION))
        await within(web.engine.saw_submit.wait())
        web.service.drain()
        assert (await client.get("/health/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 503
        go_on.set()
        assert (await within(running_call)).status_code == 200
    await within(web.service.wait_idle())


async def test_answers_are_not_held_back(web: Web) -> None:
    """Without TCP_NODELAY a kept connection's answers wait 40 ms each for the client to acknowledge their headers."""
    times = []
    async with httpx.AsyncClient(base_url=web.url) as client:
        for _ in range(9):
            start = time.perf_counter()
            assert (await client.get("/health/live")).status_code == 200
            times.append(time.perf_counter() - start)
    assert sorted(times)[4] < 0.03


async def test_many_empty_messages_do_not_stall_the_loop(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def encode_chat(messages: list[dict[str, Any]]) -> list[int]:
        threads.append(threading.current_thread())
        return [1]

    monkeypatch.setattr(engine.tokenizer, "encode_chat", encode_chat)
    message = {"role": "user", "content": ""}
    for count in (1, 10_000):
        assert (await client.post("/tokenize", json={"messages": [message] * count})).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
