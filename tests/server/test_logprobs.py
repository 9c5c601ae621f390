"""Logprobs, echo and token ids in answers: both shapes, streamed and whole, against what the engine said."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from engine.request import Delta, Event, Finished, FinishReason, Request, Scored, TokenLogprob, Usage
from server.logprobs import Offsets
from tests.fakes import BOS, FakeEngine, FakeTokenizer
from tests.server.wire import chunks_of

EURO = tuple("€".encode())


def logprob(token_id: int, value: float = -0.5, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id, value, top)


async def say_a_euro(request: Request) -> AsyncIterator[Event]:
    """`a€b` in five tokens: the euro sign is three, of which only the last brings text."""
    if request.sampling.num_prompt_logprobs is not None:
        yield Scored((None, *(logprob(id, -1.0, (id, -1.0), (97, -2.0)) for id in request.prompt[1:])))
    if request.sampling.max_tokens == 0:
        yield Finished(FinishReason.LENGTH, Usage(len(request.prompt), 0, 0))
        return
    pieces = [(b"a"[0], "a"), (EURO[0], ""), (EURO[1], ""), (EURO[2], "€"), (b"b"[0], "b")]
    asked = request.sampling.num_logprobs
    for place, (id, text) in enumerate(pieces):
        others = ((120, -0.25), (121, -math.inf))[: asked or 0]
        yield Delta(text, (id,), () if asked is None else (logprob(id, -0.1 * place, *others),))
    yield Finished(FinishReason.STOP, Usage(len(request.prompt), 0, 5))


@pytest.fixture(autouse=True)
def script(engine: FakeEngine) -> None:
    engine.script = say_a_euro


def strict(text: bytes | str) -> Any:
    """As clients in other languages parse: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def whole(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    response = await client.post(route, json={"model": "tiny", **body})
    assert response.status_code == 200
    choice: dict[str, Any] = strict(response.content)["choices"][0]
    return choice


async def streamed(client: httpx.AsyncClient, route: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(route, json={"model": "tiny", "stream": True, **body})
    strict(b"[%s]" % b",".join(line[6:] for line in response.content.split(b"\n") if line.startswith(b"data: {")))
    return [choice for chunk in chunks_of(response.content) for choice in chunk["choices"]]


async def test_completion_logprobs_are_four_aligned_lists(client: httpx.AsyncClient) -> None:
    choice = await whole(client, "/v1/completions", prompt="hé", logprobs=1)
    names = ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert choice["text"] == "a€b"
    assert choice["logprobs"] == {
        "tokens": names,
        "token_logprobs": [0.0, -0.1, -0.2, pytest.approx(-0.3), -0.4],
        "top_logprobs": [{"x": -0.25, name: pytest.approx(-0.1 * place)} for place, name in enumerate(names)],
        "text_offset": [0, 1, 1, 1, 2],
    }


async def test_echo_puts_the_prompt_and_its_logprobs_in_front(client: httpx.AsyncClient) -> None:
    choice = await whole(client, "/v1/completions", prompt="hé", logprobs=2, echo=True)
    assert choice["text"] == "héa€b"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:4] == [f"<{BOS}>", "h", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"][:4] == [None, -1.0, -1.0, -1.0]
    assert logprobs["top_logprobs"][:2] == [None, {"h": -1.0, "a": -2.0}]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3, 3, 3, 4]
    assert {len(values) for values in logprobs.values()} == {4 + 5}
    text = "héa€b"
    assert [text[offset] for offset in logprobs["text_offset"]][:2] == ["h", "h"]


async def test_echo_alone_costs_no_scoring(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    choice = await whole(client, "/v1/completions", prompt="hé", echo=True)
    assert (choice["text"], choice["logprobs"]) == ("héa€b", None)
    assert engine.requests[0].sampling.num_prompt_logprobs is None
    assert (await whole(client, "/v1/completions", prompt=[104, 105], echo=True))["text"] == "hia€b"


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_a_prompt_alone_can_be_scored(client: httpx.AsyncClient, logprobs: int | None) -> None:
    choice = await whole(client, "/v1/completions", prompt="hi", echo=True, max_tokens=0, logprobs=logprobs)
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert (choice["logprobs"] is None) == (logprobs is None)
    if choice["logprobs"]:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"echo": True}, {"echo": True, "logprobs": 0}])
@pytest.mark.parametrize("ids", [False, True])
async def test_a_completion_stream_joins_to_the_whole(
    client: httpx.AsyncClient, more: dict[str, Any], ids: bool
) -> None:
    more = more | {"prompt": ["hé", "ab"], "n": 2, "return_token_ids": ids}
    response = await client.post("/v1/completions", json={"model": "tiny", **more})
    choices = await streamed(client, "/v1/completions", **more)
    for expected in response.json()["choices"]:
        own = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        parts = [choice["logprobs"] for choice in own if choice["logprobs"]]
        joined = {name: [x for part in parts for x in part[name]] for name in parts[0]} if parts else None
        assert joined == expected["logprobs"]
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        if ids:
            assert [id for choice in own for id in choice["token_ids"]] == expected["token_ids"] == [97, *EURO, 98]
            assert own[0]["prompt_token_ids"] == expected["prompt_token_ids"]
            assert not any("prompt_token_ids" in choice for choice in own[1:])


async def test_chat_logprobs_have_bytes_that_rebuild_the_text(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    choice = await whole(client, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2)
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"] == "a€b"
    assert content[0]["top_logprobs"] == [
        {"token": "x", "logprob": -0.25, "bytes": [120]},
        {"token": "y", "logprob": -9999.0, "bytes": [121]},
    ]
    assert choice["logprobs"]["refusal"] is None
    pieces = await streamed(client, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=2)
    joined = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert joined == content
    plain = await whole(client, "/v1/chat/completions", messages=messages, logprobs=True)
    assert {len(entry["top_logprobs"]) for entry in plain["logprobs"]["content"]} == {0}


async def test_tokens_of_equal_text_can_be_told_apart(client: httpx.AsyncClient) -> None:
    choice = await whole(client, "/v1/completions", prompt="h", logprobs=2, return_tokens_as_token_ids=True)
    assert choice["logprobs"]["tokens"][:2] == ["token_id:97", f"token_id:{EURO[0]}"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:120": -0.25, "token_id:121": -9999.0, "token_id:97": 0.0}


async def test_offsets_of_a_prompt_that_spells_special_tokens(client: httpx.AsyncClient) -> None:
    """They are text there, as the client wrote it; the one in front of it is none."""
    offsets = Offsets(FakeTokenizer(), prompt="<257>h<258>")  # type: ignore[arg-type]
    assert [offsets.take(id) for id in (BOS, 257, 104, 258, 97)] == [0, 0, 5, 6, 11]


async def test_special_tokens_have_no_bytes_in_a_chat(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """So that the bytes of all entries join to the text."""

    async def ends(request: Request) -> AsyncIterator[Event]:
        yield Delta("a", (97, 257), (logprob(97), logprob(257, -0.1, (257, -0.1))))
        yield Finished(FinishReason.STOP, Usage(1, 0, 2))

    engine.script = ends
    messages = [{"role": "user", "content": "hi"}]
    choice = await whole(client, "/v1/chat/completions", messages=messages, logprobs=True, top_logprobs=1)
    first, last = choice["logprobs"]["content"]
    assert (first["bytes"], last["bytes"], last["top_logprobs"][0]["bytes"]) == ([97], None, None)


async def test_more_logprobs_than_can_be_told(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "tiny", "prompt": [[7] * 100] * 16, "n": 4, "echo": True, "logprobs": 20, "max_tokens": 1}
    monkeypatch.setattr("server.ask.MAX_SCORES", 134_399)
    response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert "134400 logprobs" in response.json()["error"]["message"]
