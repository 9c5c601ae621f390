"""Answers over HTTP: shapes, framing byte by byte, and what the openai client makes of them."""

from typing import Any

import httpx
import openai
import pytest

from tests.fakes import FakeEngine, fail_after, hang_after
from tests.server.conftest import Web, within
from tests.server.wire import CHAT, COMPLETION, MESSAGES, chunks_of, read_chunked, send

END = {"stop_reason": None}


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
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", **END}],
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
    assert answer["choices"] == [{"text": "Héllo", "index": 0, "logprobs": None, "finish_reason": "stop", **END}]
    assert answer["usage"]["completion_tokens"] == 4
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Héllo", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", **END}]


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
