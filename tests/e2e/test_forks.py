"""`n`, `kv_shrink` and the pool's numbers, asked of a whole server. With `--batch-invariant` forked = separate."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proto.quire.v1 import inference_pb2 as pb
from proto.quire.v1.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.servers import SMALL, Server, servers
from tests.helpers import random_prompt

PAGE = 32
CONTEXT = 256
NUM_TOKENS = 40  # so that siblings fill a page after they parted
SEED = 2**64 - 2  # the third sibling's is 0
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7)
Answers = list[tuple[str, str]]


@pytest.fixture(scope="module", params=["native", "int4"])
def server(request: pytest.FixtureRequest, model_folder: Path) -> Iterator[Server]:
    options = ("--batch-invariant", "--kv-format", request.param, "--max-model-len", str(CONTEXT))
    with servers() as start:
        yield start(str(model_folder), *SMALL, *options).wait_ready()


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "lively", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


def ask(server: Server, asked: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
    """(text, finish reason) of each choice, and the usage."""
    response = server.client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [(choice["text"], choice["finish_reason"]) for choice in choices], response.json()["usage"]


def ask_streamed(server: Server, asked: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
    texts, reasons, usage = {}, {}, {}
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/completions", json=streamed) as response:
        assert response.status_code == 200
        *events, done = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert done == "[DONE]"
    for event in map(json.loads, events):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            assert choice["index"] not in reasons  # nothing follows an end
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return [(texts[index], reasons[index]) for index in sorted(reasons)], usage


def ask_grpc(server: Server, prompt: list[int], **fields: Any) -> list[tuple[list[int], str]]:
    """The token ids and the text of each index."""
    sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=fields.pop("seed"), temperature=1)
    request = pb.GenerateRequest(model="lively", token_ids=pb.TokenIds(ids=prompt), sampling=sampling, **fields)
    ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    with grpc.insecure_channel(server.grpc) as channel:
        for message in InferenceServiceStub(channel).Generate(request, timeout=60):
            ids.setdefault(message.index, []).extend(message.token_ids)
            texts[message.index] = texts.get(message.index, "") + message.text
    assert all(len(of_one) == NUM_TOKENS for of_one in ids.values())
    return [(ids[index], texts[index]) for index in range(len(ids))]


def pool_of(server: Server) -> dict[str, Any]:
    response = server.client.get("/v1/pool?check=true")
    assert response.status_code == 200, response.text
    pool: dict[str, Any] = response.json()
    assert pool["check"] == "ok"
    for tier in pool["tiers"].values():
        for unit, total in tier["total"].items():
            assert sum(state[unit] for state in tier["states"].values()) == total
    return pool


def wait_idle(server: Server) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while (pool := pool_of(server))["requests"] != {"running": 0, "waiting": 0}:
        assert time.monotonic() < deadline, pool
    return pool


@pytest.mark.parametrize("length", LENGTHS)
def test_siblings_are_what_requests_of_their_own_would_be(server: Server, length: int) -> None:
    prompt = random_prompt(length, length)
    forked = ask_grpc(server, prompt, seed=SEED, n=3)
    alone = [ask_grpc(server, prompt, seed=(SEED + sibling) % 2**64)[0] for sibling in range(3)]
    assert forked == alone
    assert len({tuple(ids) for ids, _ in forked}) == 3  # else it would prove nothing
    answers, usage = ask(server, body(prompt, n=3, seed=SEED, temperature=1))
    assert answers == [(text, "length") for _, text in alone]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, 3 * NUM_TOKENS)
    wait_idle(server)


def test_several_prompts_with_several_choices(server: Server) -> None:
    prompts = [random_prompt(100 + index, length) for index, length in enumerate((PAGE + 5, 2 * PAGE))]
    asked = body(prompts, n=3, seed=7, temperature=1, stop_token_ids=list(range(0, 250, 9)))
    answers, usage = ask(server, asked)
    alone = [ask(server, {**asked, "prompt": prompt, "n": 1, "seed": 7 + i}) for prompt in prompts for i in range(3)]
    assert answers == [answer for of_one, _ in alone for answer in of_one]
    assert "stop" in {reason for _, reason in answers}  # siblings end at different times
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == sum(of_one["completion_tokens"] for _, of_one in alone)
    assert ask_streamed(server, asked)[0] == answers
    wait_idle(server)


def test_greedy_siblings_are_equal(server: Server) -> None:
    """They fill equal pages in the same steps."""
    prompt = random_prompt(200, PAGE + 9)
    answers, _ = ask(server, body(prompt, n=8, temperature=0))
    assert len(set(answers)) == 1
    assert answers[0] == ask(server, body(prompt, temperature=0))[0][0]
    wait_idle(server)


def test_a_client_that_leaves_frees_what_all_choices_held(server: Server) -> None:
    asked = {**body(random_prompt(300, 3 * PAGE), n=4), "max_tokens": CONTEXT - 3 * PAGE, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=asked) as response:
        next(response.iter_lines())
    states = wait_idle(server)["tiers"]["sealed"]["states"]
    assert {state for state, amount in states.items() if amount["bytes"]} <= {"free", "cached"}


def test_streaming_outgrows_the_context_and_other_requests_do_not(server: Server) -> None:
    prompt = random_prompt(400, PAGE + 3)
    asked = body(prompt, temperature=1, seed=1) | {"max_tokens": 2 * CONTEXT}
    refused = server.client.post("/v1/completions", json=asked)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    before = wait_idle(server)["pages"]["dropped"]
    answers, usage = ask(server, {**asked, "kv_shrink": "streaming:recent=2", "n": 2})
    assert [reason for _, reason in answers] == ["length", "length"]
    assert usage["completion_tokens"] == 2 * 2 * CONTEXT
    assert wait_idle(server)["pages"]["dropped"] > before


def test_metrics_are_those_of_the_pool(server: Server) -> None:
    ask(server, body(random_prompt(500, 2 * PAGE), n=2))
    pool = wait_idle(server)
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    samples = {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}
    for name, tier in pool["tiers"].items():
        for state, amount in tier["states"].items():
            assert samples[("quire_pool_bytes", *sorted((name, state)))] == amount["bytes"]
    assert samples[("quire_pages_sealed_total",)] == pool["pages"]["sealed"] > 0
    assert samples[("quire_prefix_hit_tokens_total",)] == pool["prefix_cache"]["hit_tokens"]
