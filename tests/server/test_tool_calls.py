"""Answers that must be JSON, and answers that call tools, from a request to what clients put together."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest

from engine.request import Delta, Event, Finished, FinishReason, Request, Usage
from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.fakes import FakeEngine
from tests.server.conftest import Running, Web, within
from tests.server.live import Live, chat_tokenizer, serve

WEATHER = {
    "name": "weather",
    "description": "The weather somewhere.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "stop"}}]
MESSAGES: Any = [{"role": "user", "content": "How is it in Paris?"}]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
async def engine() -> FakeEngine:
    """One whose model writes calls as Hermes does."""
    engine = FakeEngine()
    engine.tokenizer = chat_tokenizer()  # type: ignore[assignment]
    engine.info = type(engine.info)(max_model_len=4096)
    engine.script = speak(CALLS)
    return engine


def speak(text: str, reason: FinishReason = FinishReason.STOP, size: int = 3) -> Any:
    async def script(request: Request) -> AsyncIterator[Event]:
        for start in range(0, len(text), size):
            yield Delta(text[start : start + size], (1,))
        yield Finished(reason, Usage(len(request.prompt), 0, len(text)))

    return script


async def ask(client: httpx.AsyncClient, **more: Any) -> Any:
    body = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, **more}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_calls_of_a_whole_answer(client: httpx.AsyncClient) -> None:
    choice = await ask(client)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me see.", "tool_calls")
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == "function" and first["id"] != second["id"]
    assert json.loads(first["function"]["arguments"]) == {"city": "Paris", "days": 2}
    assert second["function"] == {"name": "stop", "arguments": "{}"}


async def test_an_answer_of_calls_alone_has_no_content(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = speak(CALLS.removeprefix("Let me see.\n"))
    assert (await ask(client))["message"]["content"] is None


async def test_openai_clients_put_streamed_calls_together(web: Web) -> None:
    whole = await web.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS)
    async with web.openai.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS, n=2) as helper:
        final = await within(helper.get_final_completion())
    assert len(final.choices) == 2
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
        assert choice.message.tool_calls and whole.choices[0].message.tool_calls
        for ours, theirs in zip(choice.message.tool_calls, whole.choices[0].message.tool_calls, strict=True):
            assert ours.function.name == theirs.function.name  # type: ignore[union-attr]
            assert ours.function.arguments == theirs.function.arguments  # type: ignore[union-attr]


async def test_chunks_of_a_streamed_call(web: Web) -> None:
    """Id and name once, an index always: clients join strings and sort by index."""
    stream = await web.openai.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [(part.index, bool(part.id)) for part in parts if part.id] == [(0, True), (1, True)]
    assert all(part.function is not None and isinstance(part.index, int) for part in parts)
    assert [part.function.name for part in parts if part.function and part.function.name] == ["weather", "stop"]


async def test_text_that_is_cut_off_inside_a_call(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = speak(CALLS[:70], FinishReason.LENGTH)
    choice = await ask(client)
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


async def test_without_tools_the_text_stays_as_it_is(client: httpx.AsyncClient) -> None:
    for more in ({"tools": None}, {"tool_choice": "none"}):
        choice = await ask(client, **more)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
        assert "tool_calls" not in choice["message"]


async def test_the_template_gets_tools_calls_and_results(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]  # fmt: skip
    await ask(client, messages=messages)
    text = engine.tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False)
    assert '"description": "The weather somewhere."' in text and "<|im_start|>tool\nsunny<|im_end|>" in text
    await ask(client, messages=messages, tool_choice="none")
    assert "The weather somewhere" not in engine.tokenizer.decode(engine.requests[1].prompt)


async def test_grpc_chat_says_the_same(running: Running, web: Web) -> None:
    tool = pb.Tool(name="weather", parameters_json=json.dumps(WEATHER["parameters"]))
    request = pb.ChatRequest(
        model="tiny", messages=[pb.ChatMessage(role="user", content="hi")], tools=[tool, pb.Tool(name="stop")]
    )
    messages = [message async for message in running.stub.Chat(request)]
    assert "".join(message.text for message in messages) == "Let me see."
    parts = [part for message in messages for part in message.tool_calls]
    assert [(part.index, part.name) for part in parts if part.id] == [(0, "weather"), (1, "stop")]
    arguments = "".join(part.arguments_json for part in parts if part.index == 0)
    assert json.loads(arguments) == {"city": "Paris", "days": 2}
    assert messages[-1].finish.reason == pb.FINISH_REASON_TOOL_CALLS
    assert [message.HasField("finish") for message in messages].count(True) == 1
    async with httpx.AsyncClient(base_url=web.url) as client:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        await client.post("/v1/chat/completions", json=body)
        answer = await client.post("/tokenize", json={"messages": body["messages"]})
    plain = pb.ChatRequest(model="tiny", messages=[pb.ChatMessage(role="user", content="hi")])
    _ = [message async for message in running.stub.Chat(plain)]
    ours, theirs = running.engine.requests[-2:]
    assert ours.prompt == theirs.prompt and ours.sampling.max_tokens == theirs.sampling.max_tokens
    conversation = pb.Conversation(messages=plain.messages)
    tokenized = await running.stub.Tokenize(pb.TokenizeRequest(model="tiny", conversation=conversation))
    assert list(tokenized.token_ids) == answer.json()["tokens"] == list(ours.prompt)
    back = await running.stub.Detokenize(pb.DetokenizeRequest(model="tiny", token_ids=tokenized.token_ids))
    assert back.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with serve(max_model_len=1024) as live:
        yield live


async def test_the_model_writes_what_the_schema_allows(live: Live) -> None:
    """A random model: without the grammar it writes noise."""
    async with live.client() as client:
        plain = {"model": "tiny", "messages": MESSAGES, "max_tokens": 200, "temperature": 1.0, "n": 3, "seed": 5}
        for format in (
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
        ):
            answer = (await client.post("/v1/chat/completions", json={**plain, "response_format": format})).json()
            finished = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
            if format["type"] == "json_schema":
                assert len(finished) == 3  # it allows no more than some 60 characters
            for choice in finished:
                value = json.loads(choice["message"]["content"])
                jsonschema.validate(value, SCHEMA if format["type"] == "json_schema" else {"type": "object"})
        noise = (await client.post("/v1/chat/completions", json=plain)).json()["choices"][0]["message"]["content"]
        with pytest.raises(ValueError):
            json.loads(noise)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_the_model_calls_the_tool_that_it_must(live: Live, choice: Any) -> None:
    client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    async with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[TOOLS[0]], tool_choice=choice, temperature=1.0, seed=3,
        parallel_tool_calls=False, max_tokens=300,
    ) as helper:  # fmt: skip
        final = await within(helper.get_final_completion(), 60)
    (call,) = final.choices[0].message.tool_calls or ()
    assert final.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])


async def test_a_bad_grammar_hurts_nobody(live: Live) -> None:
    """Valid, malformed, valid again; beside a request without any."""
    good = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"enum": ["yes", "no"]}}}
    bad = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"pattern": "(foo**"}}}
    async with live.client() as client:
        statuses = []
        for format in (good, bad, good, bad, good):
            body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20, "response_format": format}
            response = await client.post("/v1/chat/completions", json=body)
            statuses.append(response.status_code)
            if response.status_code == 200:
                assert json.loads(response.json()["choices"][0]["message"]["content"]) in ("yes", "no")
        assert statuses == [200, 400, 200, 400, 200]


async def test_grpc_generates_json_too(live: Live) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{live.grpc}") as channel:
        request = pb.GenerateRequest(
            model="tiny", text="x", sampling=pb.SamplingParams(temperature=1, max_tokens=60),
            response_format=pb.ResponseFormat(json_schema=json.dumps({"enum": [1, 22, 333]})),
        )  # fmt: skip
        messages = [message async for message in InferenceServiceStub(channel).Generate(request)]
        assert json.loads("".join(message.text for message in messages)) in (1, 22, 333)
        request.response_format.json_schema = "{"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in InferenceServiceStub(channel).Generate(request):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
