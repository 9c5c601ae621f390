"""What is refused, how, and what is let through: over HTTP, in the OpenAI error shape."""

import json
import logging
from typing import Any

import httpx
import pytest

from engine.errors import ErrorKind, RequestError
from tests.fakes import FakeEngine
from tests.server.conftest import Web

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
OBJECT = {"type": "json_object"}
HI = {"role": "user", "content": "hi"}
PRIVATE = "canary-7421"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": value}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [HI], **fields}


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


# (route, body, field named, code, something the message must say)
BAD_FIELDS = [
    (COMPLETIONS, completion(temperature=2.1), "temperature", "invalid_value", "0 to 2"),
    (COMPLETIONS, completion(temperature=-0.1), "temperature", "invalid_value", "0 to 2"),
    (COMPLETIONS, completion(temperature="1"), "temperature", "invalid_type", "0 to 2"),
    (COMPLETIONS, completion(temperature=True), "temperature", "invalid_type", "0 to 2"),
    (COMPLETIONS, completion(temperature=10**400), "temperature", "invalid_type", "0 to 2"),
    (COMPLETIONS, completion(top_p=0), "top_p", "invalid_value", "at most 1"),
    (COMPLETIONS, completion(top_p=1.5), "top_p", "invalid_value", "at most 1"),
    (COMPLETIONS, completion(top_k=-2), "top_k", "invalid_value", "-1"),
    (COMPLETIONS, completion(top_k=301), "top_k", "invalid_value", "300"),
    (COMPLETIONS, completion(top_k=1.5), "top_k", "invalid_type", "integer"),
    (COMPLETIONS, completion(seed=2**64), "seed", "invalid_value", "2**64 - 1"),
    (COMPLETIONS, completion(seed=-(2**63) - 1), "seed", "invalid_value", "-2**63"),
    (COMPLETIONS, completion(seed=True), "seed", "invalid_type", "integer"),
    (COMPLETIONS, completion(seed=10**4000), "seed", "invalid_value", "2**64 - 1"),
    (COMPLETIONS, completion(max_tokens=0), "max_tokens", "invalid_value", "unless echo is true"),
    (COMPLETIONS, completion(max_tokens=-1), "max_tokens", "invalid_value", "from 1"),
    (COMPLETIONS, completion(max_tokens="5"), "max_tokens", "invalid_type", "from 1"),
    (COMPLETIONS, completion(max_tokens=10**4000), "max_tokens", "invalid_value", "2147483647"),
    (COMPLETIONS, completion(max_tokens=126), "prompt", "context_length_exceeded", "3 tokens and max_tokens is 126"),
    (COMPLETIONS, completion(prompt=[1] * 128), "prompt", "context_length_exceeded", "128"),
    (COMPLETIONS, completion(prompt=[300] * 500), "prompt", "context_length_exceeded", "500"),
    (COMPLETIONS, completion(prompt="x" * 5000), "prompt", "context_length_exceeded", "5001"),
    (COMPLETIONS, completion(prompt=["ok", "x" * 500]), "prompt", "context_length_exceeded", "501"),
    (COMPLETIONS, completion(stop=["a"] * 5), "stop", "invalid_value", "at most 4"),
    (COMPLETIONS, completion(stop=""), "stop", "invalid_value", "1 to 256"),
    (COMPLETIONS, completion(stop=["x" * 257]), "stop", "invalid_value", "1 to 256"),
    (COMPLETIONS, completion(stop=[1]), "stop", "invalid_value", "strings"),
    (COMPLETIONS, completion(stop={"a": 1}), "stop", "invalid_value", "strings"),
    (COMPLETIONS, completion(stop_token_ids=[300]), "stop_token_ids", "invalid_value", "0 to 299"),
    (COMPLETIONS, completion(stop_token_ids=[True]), "stop_token_ids", "invalid_value", "0 to 299"),
    (COMPLETIONS, completion(stop_token_ids=[1] * 65), "stop_token_ids", "invalid_value", "64"),
    (COMPLETIONS, completion(stop_token_ids="1"), "stop_token_ids", "invalid_type", "list"),
    (COMPLETIONS, completion(ignore_eos=1), "ignore_eos", "invalid_type", "true or false"),
    (COMPLETIONS, completion(stream="yes"), "stream", "invalid_type", "true or false"),
    (COMPLETIONS, completion(stream_options={"include_usage": True}), "stream_options", "invalid_value", "stream"),
    (COMPLETIONS, completion(stream=True, stream_options=3), "stream_options", "invalid_type", "object"),
    (COMPLETIONS, completion(prompt=""), "prompt", "invalid_value", "empty"),
    (COMPLETIONS, completion(prompt=["a", ""]), "prompt", "invalid_value", "empty"),
    (COMPLETIONS, completion(prompt=[]), "prompt", "invalid_value", "1 to 64"),
    (COMPLETIONS, completion(prompt=[[]]), "prompt", "invalid_value", "empty"),
    (COMPLETIONS, completion(prompt=None), "prompt", "invalid_value", "string"),
    (COMPLETIONS, without(completion(), "prompt"), "prompt", "invalid_value", "string"),
    (COMPLETIONS, completion(prompt=7), "prompt", "invalid_value", "string"),
    (COMPLETIONS, completion(prompt=[-1]), "prompt", "invalid_value", "0 to 299"),
    (COMPLETIONS, completion(prompt=[1, 300]), "prompt", "invalid_value", "0 to 299"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt", "invalid_value", "prompt[1]"),
    (COMPLETIONS, completion(prompt=[True]), "prompt", "invalid_value", "prompt[0]"),
    (COMPLETIONS, completion(prompt=[10**300]), "prompt", "invalid_value", "0 to 299"),
    (COMPLETIONS, completion(prompt=["a", [1]]), "prompt", "invalid_value", "mixed"),
    (COMPLETIONS, completion(prompt=["a"] * 65), "prompt", "invalid_value", "64"),
    (COMPLETIONS, completion(n=0), "n", "invalid_value", "from 1"),
    (COMPLETIONS, completion(n=5), "n", "invalid_value", "n is 5; this server runs at most 4 sequences at once"),
    (COMPLETIONS, completion(n=10**4000), "n", "invalid_value", "from 1"),
    (COMPLETIONS, completion(n=True), "n", "invalid_type", "integer"),
    (COMPLETIONS, completion(n="2"), "n", "invalid_type", "integer"),
    (COMPLETIONS, completion(prompt=["a"] * 17, n=4), "n", "invalid_value",
     "17 prompts with n = 4 are 68 sequences; this server queues at most 64"),
    (COMPLETIONS, completion(priority=2**31), "priority", "invalid_value", "2**31 - 1"),
    (COMPLETIONS, completion(priority=-(2**31) - 1), "priority", "invalid_value", "-2**31"),
    (COMPLETIONS, completion(priority=1.5), "priority", "invalid_type", "lower is more urgent"),
    (COMPLETIONS, completion(priority=True), "priority", "invalid_type", "integer"),
    (COMPLETIONS, completion(kv_shrink=3), "kv_shrink", "invalid_type", "streaming:recent=32"),
    (COMPLETIONS, completion(kv_shrink=""), "kv_shrink", "invalid_value", "one of streaming, h2o, snapkv"),
    (COMPLETIONS, completion(kv_shrink=PRIVATE), "kv_shrink", "invalid_value", "one of streaming, h2o, snapkv"),
    (COMPLETIONS, completion(kv_shrink="streaming:recent=0"), "kv_shrink", "invalid_value", "from 1"),
    (COMPLETIONS, completion(kv_shrink=f"h2o:{PRIVATE}=1"), "kv_shrink", "invalid_value", "heavy, recent, window"),
    (COMPLETIONS, completion(kv_shrink="h2o"), "kv_shrink", "invalid_value", "--host-memory, or use streaming"),
    (COMPLETIONS, completion(kv_shrink="snapkv:keep=2"), "kv_shrink", "invalid_value", "--host-memory"),
    (COMPLETIONS, completion(best_of=3), "best_of", "unsupported_parameter", "not supported"),
    (COMPLETIONS, completion(suffix="s"), "suffix", "unsupported_parameter", "not supported"),
    (COMPLETIONS, without(completion(), "model"), "model", "missing_required_parameter", "required"),
    (COMPLETIONS, completion(model=3), "model", "invalid_type", "name"),
    (CHAT, without(chat(), "messages"), "messages", "missing_required_parameter", "required"),
    (CHAT, chat(messages=[]), "messages", "invalid_value", "at least one"),
    (CHAT, chat(messages="hi"), "messages", "invalid_type", "at least one"),
    (CHAT, chat(messages=["hi"]), "messages[0]", "invalid_type", "object"),
    (CHAT, chat(messages=[HI, {"content": "x"}]), "messages[1].role", "missing_required_parameter", "required"),
    (CHAT, chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role", "invalid_value", "assistant"),
    (CHAT, chat(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "invalid_value", "1 to 256"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content", "invalid_type", "text parts"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PRIVATE}}]}]),
     "messages[0].content", "invalid_value", "text"),
    (CHAT, chat(messages=[{**HI, "tool_calls": [{}]}]), "messages[0].tool_calls", "invalid_value", "role assistant"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens", "invalid_value", "from 1"),
    (CHAT, chat(max_completion_tokens=3, max_tokens=4), "max_completion_tokens", "invalid_value", "differ"),
    (CHAT, chat(n=5), "n", "invalid_value", "at most 4 sequences"),
    (CHAT, chat(priority="high"), "priority", "invalid_type", "integer"),
    (CHAT, chat(kv_shrink="h2o"), "kv_shrink", "invalid_value", "--host-memory"),
    (CHAT, chat(max_tokens=128), "messages", "context_length_exceeded", "128 tokens"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", "invalid_type", "an object"),
    (CHAT, chat(tools=[TOOL]), "tools", "unsupported_parameter", "no place for tools"),
    (CHAT, chat(tools=[TOOL], tool_choice="any"), "tool_choice", "invalid_value", "none, auto, required"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "invalid_value", "no tools"),
    (CHAT, chat(tools=[TOOL], response_format=OBJECT), "response_format", "invalid_value", "exclude each other"),
    (CHAT, chat(parallel_tool_calls=1), "parallel_tool_calls", "invalid_type", "true or false"),
    (CHAT, chat(chat_template_kwargs={"tools": 1}), "chat_template_kwargs", "invalid_value", "none of"),
    (CHAT, chat(chat_template_kwargs={"a": []}), "chat_template_kwargs", "invalid_value", "value 1"),
    (CHAT, chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs", "invalid_value", "none of"),
    (COMPLETIONS, completion(tools=[TOOL]), "tools", "unsupported_parameter", "not supported"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format", "invalid_value", "json_object"),
    (CHAT, chat(response_format="json_object"), "response_format", "invalid_value", "json_object"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format", "invalid_value", "json_schema"),
    (CHAT, chat(response_format=schema(7)), "response_format", "invalid_schema", "must be an object"),
    (CHAT, chat(response_format=schema({"type": "no"})), "response_format", "invalid_schema", "cannot be used"),
    (CHAT, chat(response_format=schema({"pattern": "(foo**"})), "response_format", "invalid_schema", "cannot be used"),
    (CHAT, chat(response_format=schema({"$ref": "http://x/y"})), "response_format", "invalid_schema", "cannot be used"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), "top_logprobs", "invalid_value", "from 0 to 20"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value", "from 0 to 20"),
    (CHAT, chat(top_logprobs=1), "top_logprobs", "invalid_value", "when logprobs is true"),
    (CHAT, chat(logprobs=1), "logprobs", "invalid_type", "true or false"),
    (CHAT, chat(echo=True), "echo", "unsupported_parameter", "not supported"),
    (COMPLETIONS, completion(logprobs=21), "logprobs", "invalid_value", "from 0 to 20"),
    (COMPLETIONS, completion(logprobs=-1), "logprobs", "invalid_value", "from 0 to 20"),
    (COMPLETIONS, completion(logprobs=True), "logprobs", "invalid_type", "from 0 to 20"),
    (COMPLETIONS, completion(echo="yes"), "echo", "invalid_type", "true or false"),
    (COMPLETIONS, completion(logit_bias={"300": 1}), "logit_bias", "invalid_value", "from 0 to 299"),
    (COMPLETIONS, completion(logit_bias={"-1": 1}), "logit_bias", "invalid_value", "from 0 to 299"),
    (COMPLETIONS, completion(logit_bias={"1.0": 1}), "logit_bias", "invalid_value", "from 0 to 299"),
    (COMPLETIONS, completion(logit_bias={"\u0663": 1}), "logit_bias", "invalid_value", "from 0 to 299"),
    (COMPLETIONS, completion(logit_bias={"9" * 5000: 1}), "logit_bias", "invalid_value", "from 0 to 299"),
    (COMPLETIONS, completion(logit_bias={"7": 1, "07": 2}), "logit_bias", "invalid_value", "twice"),
    (COMPLETIONS, completion(logit_bias={"7": 101}), "logit_bias", "invalid_value", "-100 to 100"),
    (COMPLETIONS, completion(logit_bias={"7": True}), "logit_bias", "invalid_value", "-100 to 100"),
    (COMPLETIONS, completion(logit_bias={"7": "1"}), "logit_bias", "invalid_value", "-100 to 100"),
    (COMPLETIONS, completion(logit_bias=[7]), "logit_bias", "invalid_value", "object"),
    (COMPLETIONS, completion(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "invalid_value", "1024"),
    (COMPLETIONS, completion(presence_penalty=2.1), "presence_penalty", "invalid_value", "from -2 to 2"),
    (COMPLETIONS, completion(frequency_penalty=-2.1), "frequency_penalty", "invalid_value", "from -2 to 2"),
    (COMPLETIONS, completion(repetition_penalty=0), "repetition_penalty", "invalid_value", "from 0.01 to 10"),
    (COMPLETIONS, completion(repetition_penalty=1e-40), "repetition_penalty", "invalid_value", "from 0.01 to 10"),
    (COMPLETIONS, completion(repetition_penalty=11), "repetition_penalty", "invalid_value", "from 0.01 to 10"),
    (COMPLETIONS, completion(min_p=1.1), "min_p", "invalid_value", "from 0 to 1"),
    (COMPLETIONS, completion(min_p="0"), "min_p", "invalid_type", "from 0 to 1"),
    (COMPLETIONS, completion(min_tokens=17), "min_tokens", "invalid_value", "at most max_tokens, which is 16"),
    (COMPLETIONS, completion(min_tokens=-1), "min_tokens", "invalid_value", "from 0"),
    (COMPLETIONS, completion(return_token_ids=1), "return_token_ids", "invalid_type", "true or false"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template", "unsupported_parameter", "not supported"),
    ("/tokenize", {}, "prompt", "invalid_value", "either"),
    ("/tokenize", {"prompt": "a", "messages": [HI]}, "prompt", "invalid_value", "either"),
    ("/tokenize", {"prompt": 5}, "prompt", "invalid_type", "string"),
    ("/detokenize", {"tokens": [300]}, "tokens", "invalid_value", "0 to 299"),
    ("/detokenize", {"tokens": "abc"}, "tokens", "invalid_type", "list"),
    ("/detokenize", {}, "tokens", "missing_required_parameter", "required"),
]  # fmt: skip


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error object, after checking what all of them promise."""
    assert len(response.content) < 4096
    assert PRIVATE not in response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["code"], str) and isinstance(error["message"], str)
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(("route", "body", "param", "code", "says"), BAD_FIELDS)
async def test_bad_field(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: Any, param: str, code: str, says: str
) -> None:
    response = await client.post(route, content=json.dumps({**body, "unheard_of": PRIVATE}))
    error = error_of(response)
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]
    assert param in error["message"] or code == "context_length_exceeded"
    assert engine.requests == []


BAD_BYTES = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_json"),
    (b'"x"', 400, "invalid_json"),
    (b"null", 400, "invalid_json"),
    (b"\xff\xfe{}", 400, "invalid_json"),
    (b'{"model":"tiny","prompt":"\xff"}', 400, "invalid_json"),
    (b'{"model":"tiny","prompt":"\\ud800"}', 400, "invalid_json"),
    (b'{"model":"tiny","prompt":"hi","temperature":NaN}', 400, "invalid_json"),
    (b'{"model":"tiny","prompt":"hi","temperature":-Infinity}', 400, "invalid_json"),
    (b'{"model":"tiny","prompt":"hi","temperature":1e999}', 400, "invalid_value"),
    (b'{"model":"tiny","prompt":"hi","seed":' + b"9" * 5000 + b"}", 400, "invalid_json"),
    (b'{"a":' * 100_000, 400, "invalid_json"),
    (b"[" * 100_000, 400, "invalid_json"),
    (b'{"model":"canary-7421","prompt":"hi"}', 404, "model_not_found"),
    (b" " * (8 * 2**20 + 1), 413, "request_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BYTES, ids=lambda value: str(value)[:40])
async def test_bad_bytes(client: httpx.AsyncClient, body: bytes, status: int, code: str) -> None:
    response = await client.post(COMPLETIONS, content=body, headers={"content-type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_chunked_body_over_the_limit_is_413(web: Web) -> None:
    async def parts() -> Any:
        for _ in range(9):
            yield b" " * 2**20

    async with httpx.AsyncClient() as client:
        response = await client.post(f"{web.url}{COMPLETIONS}", content=parts())
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(("method", "route", "status"), [("GET", "/nowhere", 404), ("GET", COMPLETIONS, 405)])
async def test_unknown_routes_have_the_error_shape(
    client: httpx.AsyncClient, method: str, route: str, status: int
) -> None:
    response = await client.request(method, route)
    assert response.status_code == status
    error_of(response)
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


NO_OPS = {
    "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "min_p": 0,
    "logit_bias": {}, "logprobs": None, "top_logprobs": 0, "echo": False, "suffix": None, "tools": [],
    "tool_choice": "none", "response_format": {"type": "text"}, "min_tokens": 0, "user": "u", "metadata": {"a": "b"},
    "store": False, "service_tier": "auto", "top_k": None, "stop": None, "stop_token_ids": None, "seed": None,
    "temperature": None, "top_p": None, "max_tokens": None, "stream": None, "stream_options": None, "ignore_eos": None,
    "n": None, "priority": None, "kv_shrink": None,
}  # fmt: skip


@pytest.mark.parametrize(("route", "body"), [(COMPLETIONS, completion()), (CHAT, chat())])
async def test_fields_at_their_no_op_value_are_accepted(
    client: httpx.AsyncClient, engine: FakeEngine, route: str, body: dict[str, Any]
) -> None:
    assert (await client.post(route, json={**body, **NO_OPS})).status_code == 200
    first = engine.requests[0].sampling
    assert (first.temperature, first.top_k, first.top_p, first.stop, first.ignore_eos) == (1.0, 0, 1.0, (), False)


async def test_unknown_fields_are_ignored_and_logged_without_values(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = await client.post(COMPLETIONS, json=completion(unheard_of=PRIVATE, other=1))
    assert response.status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("server")]
    assert len(lines) == 1 and "unheard_of" in lines[0]
    assert PRIVATE not in caplog.text


async def test_defaults(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion())
    await client.post(CHAT, json=chat())
    await client.post(COMPLETIONS, json=completion(prompt=[1] * 120))
    completed, chatted, nearly_full = engine.requests
    assert completed.sampling.max_tokens == 16
    assert chatted.sampling.max_tokens == 128 - len(chatted.prompt)
    assert nearly_full.sampling.max_tokens == 8
    assert completed.sampling.seed != chatted.sampling.seed
    assert completed.id != chatted.id


async def test_bounds_are_inclusive(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    edges = [
        {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_k": 300}, {"top_k": -1}, {"max_tokens": 125},
        {"seed": 2**64 - 1}, {"seed": -(2**63)}, {"stop": ["x" * 256] * 4}, {"stop_token_ids": [0, 299]},
    ]  # fmt: skip
    for edge in edges:
        assert (await client.post(COMPLETIONS, json=completion(**edge))).status_code == 200, edge
    sampling = [request.sampling for request in engine.requests]
    assert [s.top_k for s in sampling[3:5]] == [300, 0]
    assert [s.seed for s in sampling[6:8]] == [2**64 - 1, 2**63]
    assert sampling[9].stop_token_ids == {0, 299}


async def test_message_parts_and_roles(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert (await client.post(CHAT, json=chat(messages=messages))).status_code == 200
    assert engine.tokenizer.decode(engine.requests[0].prompt) == "<system>be brief<user>a\nb"


async def test_a_prompt_too_long_for_the_thread_limit_is_still_tokenized(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    response = await client.post("/tokenize", json={"prompt": "é" * 9000})
    assert response.json()["count"] == 18001


async def test_refusals_of_the_engine_keep_their_status(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    for kind, status, retry in [(ErrorKind.OVERLOADED, 429, "1"), (ErrorKind.UNAVAILABLE, 503, "1")]:
        engine.refusal = RequestError(kind, "no room")
        for stream in (False, True):
            response = await client.post(COMPLETIONS, json=completion(stream=stream))
            assert (response.status_code, response.headers["retry-after"]) == (status, retry)
            assert error_of(response)["message"] == "no room"
