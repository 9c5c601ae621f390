"""With `--batch-invariant`, one server and one set of prompts give the same tokens in every way of asking."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.servers import SMALL, Server, servers
from tests.helpers import COVERING_RECIPES, random_prompt

NUM_TOKENS = 24
REASONS = {pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_STOP: "stop"}


@dataclass(frozen=True)
class Answer:
    text: str
    reason: str
    num_tokens: int


@pytest.fixture(scope="module", params=COVERING_RECIPES)
def server(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Server]:
    with servers() as start:
        yield start(str(model_folder), *SMALL, "--batch-invariant", "--kv-format", request.param).wait_ready()


def requests() -> list[dict[str, Any]]:
    """Prompts from one token to several chunks; greedy and sampled; one with stops."""
    prompts = [random_prompt(i, length) for i, length in enumerate((1, 31, 32, 33, 60, 100, 150))]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"temperature": 0},
        {"temperature": 1.2, "seed": 2**63, "top_k": 20},
        {"temperature": 2, "seed": 4, "stop": ["e", "a"], "stop_token_ids": list(range(0, 256, 4))},
        {"temperature": 0},
        {"seed": 1, "top_k": 200, "top_p": 0.95},
    ]
    return [
        {"model": "lively", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]


def ask(server: Server, body: dict[str, Any]) -> Answer:
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return Answer(choice["text"], choice["finish_reason"], response.json()["usage"]["completion_tokens"])


def ask_streamed(server: Server, body: dict[str, Any]) -> Answer:
    text, reason, usage = "", "", {}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
    return Answer(text, reason, usage["completion_tokens"])


def ask_grpc(server: Server, body: dict[str, Any]) -> tuple[Answer, list[int]]:
    fields = {name: value for name, value in body.items() if name not in ("model", "prompt")}
    message = pb.GenerateRequest(
        model=body["model"], token_ids=pb.TokenIds(ids=body["prompt"]), sampling=pb.SamplingParams(**fields)
    )
    with grpc.insecure_channel(server.grpc) as channel:
        messages = list(InferenceServiceStub(channel).Generate(message, timeout=60))
    finish = messages[-1].finish
    answer = Answer("".join(m.text for m in messages), REASONS[finish.reason], finish.usage.generated_tokens)
    ids = [id for message in messages for id in message.token_ids]
    assert len(ids) == answer.num_tokens
    return answer, ids


def test_every_way_of_asking_gives_the_same(server: Server) -> None:
    alone = [ask_grpc(server, body) for body in requests()]
    assert [ask(server, body) for body in requests()] == [answer for answer, _ in alone]
    assert [ask_streamed(server, body) for body in requests()] == [answer for answer, _ in alone]
    assert all(answer.num_tokens == NUM_TOKENS for answer, _ in alone if answer.reason == "length")
    # Or else the equalities would prove nothing.
    assert {answer.reason for answer, _ in alone} == {"length", "stop"}
    assert all(len(set(ids)) > 5 for answer, ids in alone if answer.reason == "length")

    together: dict[tuple[str, int], Any] = {}

    def collect(key: tuple[str, int], how: Any, body: dict[str, Any]) -> None:
        together[key] = how(server, body)

    ways = {"http": ask, "stream": ask_streamed, "grpc": ask_grpc}
    threads = [
        threading.Thread(target=collect, args=((name, index), how, body))
        for name, how in ways.items()
        for index, body in enumerate(requests())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (answer, ids) in enumerate(alone):
        assert together[("http", index)] == answer
        assert together[("stream", index)] == answer
        assert together[("grpc", index)] == (answer, ids)


def test_one_call_with_all_prompts_gives_the_same(server: Server) -> None:
    greedy = [{**body, "temperature": 0} for body in requests() if "stop" not in body]
    alone = [ask(server, body) for body in greedy]
    body = {**greedy[0], "prompt": [body["prompt"] for body in greedy]}
    response = server.client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in response["choices"]] == [answer.text for answer in alone]
    assert response["usage"]["completion_tokens"] == sum(answer.num_tokens for answer in alone)
