"""The HTTP routes that generate nothing, and what all answers share."""

import re
import threading
import time
from typing import Any

import httpx
import pytest

from tests.fakes import FakeEngine
from tests.server.conftest import Web
from tests.server.wire import CHAT, COMPLETION


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


async def test_what_clients_that_tokenize_ask_for(client: httpx.AsyncClient) -> None:
    info = (await client.get("/tokenizer_info")).json()
    assert set(info) == {"eos_token", "bos_token", "pad_token", "chat_template"}
