"""What is known of a call when it is over: its log line, its metrics, and what neither may hold."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Finished, FinishReason, Request, Usage
from proto.quire.v1 import inference_pb2 as pb
from server.log_lines import JsonFormatter
from tests.fakes import FakeEngine, fail_after, hang_after
from tests.server.conftest import Running, Web, within
from tests.server.wire import COMPLETION, send

CANARY = "canary-7421"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The objects that the log would hold, one a call."""
    caplog.set_level(logging.INFO)

    def lines() -> list[dict[str, Any]]:
        formatter = JsonFormatter()
        return [json.loads(formatter.format(record)) for record in caplog.records if record.name == "quire.calls"]

    return lines


async def metric(client: httpx.AsyncClient, name: str, **labels: str) -> float:
    text = (await client.get("/metrics")).text
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    (value,) = [s.value for s in samples if s.name == f"quire_{name}" and s.labels == labels]
    return value


async def test_a_finished_call_leaves_one_line(client: httpx.AsyncClient, lines: Any) -> None:
    headers = {"x-request-id": "mine-1", "traceparent": TRACE}
    await client.post("/v1/completions", json={**COMPLETION, "prompt": CANARY, "n": 2}, headers=headers)
    (line,) = lines()
    assert {name: line[name] for name in ("request_id", "trace_id", "api", "key", "model", "end", "reason")} == {
        "request_id": "mine-1", "trace_id": TRACE[3:35], "api": "http", "key": "-", "model": "tiny", "end": "finished",
        "reason": "stop",
    }  # fmt: skip
    assert (line["choices"], line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (2, 12, 3, 8)
    assert line["level"] == "info" and 0 <= line["ttft_ms"] <= line["e2e_ms"]


@pytest.mark.parametrize("given", ["\x1b[31m" * 8, "00-" + "g" * 32 + "-" + "0" * 16 + "-01", "00-x-y-z", ""])
async def test_a_traceparent_that_is_none(client: httpx.AsyncClient, lines: Any, given: str) -> None:
    await client.post("/v1/completions", json=COMPLETION, headers={"traceparent": given.encode()})
    assert lines()[0]["trace_id"] is None


async def test_no_text_of_a_call_reaches_the_log(
    client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def speak(request: Request) -> AsyncIterator[Event]:
        yield Delta(CANARY, (1,))
        yield Finished(FinishReason.STOP, Usage(1, 0, 1), CANARY)

    engine.script = speak
    message = {"role": "user", "content": CANARY}
    for body in ({"prompt": CANARY}, {"prompt": CANARY, "temperature": CANARY}, {"prompt": [CANARY]}, {CANARY: CANARY}):
        await client.post("/v1/completions", json={"model": "tiny", **body, "user": CANARY, "stop": [CANARY]})
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": [message], "stream": True})
    await client.post("/v1/completions", json={"model": CANARY, "prompt": "x"})
    await client.post("/v1/completions", content=CANARY)
    text = "\n".join(JsonFormatter().format(record) for record in caplog.records if record.name.startswith("server"))
    text += "\n".join(
        JsonFormatter().format(record) for record in caplog.records if record.name.startswith(("engine", "quire"))
    )
    assert "rejected" in text
    # the name of an unknown field is told, cut short, so that its sender can find the mistake
    assert text.replace(f"['{CANARY}']", "").count(CANARY) == 0


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"model": "tiny"}, 400, "invalid"),
        ({"model": "x", "prompt": "x"}, 404, "not_found"),
        ({"model": "tiny", "prompt": "x" * 9_000_000}, 413, "too_large"),
    ],
)
async def test_refused_calls_are_counted_by_reason(
    client: httpx.AsyncClient, lines: Any, body: dict[str, Any], status: int, reason: str
) -> None:
    assert (await client.post("/v1/completions", json=body)).status_code == status
    (line,) = lines()
    assert (line["end"], line["reason"]) == ("rejected", reason)
    assert await metric(client, "requests_rejected_total", reason=reason) == 1
    assert await metric(client, "time_to_first_token_seconds_count") == 0


async def test_what_a_full_engine_refuses(client: httpx.AsyncClient, engine: FakeEngine, lines: Any) -> None:
    engine.refusal = RequestError(ErrorKind.OVERLOADED, "many wait", code="queue_full")
    response = await client.post("/v1/completions", json=COMPLETION)
    assert response.status_code == 429 and int(response.headers["retry-after-ms"]) == 1000
    engine.refusal = None
    assert await metric(client, "requests_rejected_total", reason="queue_full") == 1
    assert lines()[0]["reason"] == "queue_full"


async def test_a_full_queue_refuses_before_it_tokenizes(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **_: tokenized.append(text) or [1])
    engine.lack_of_room = RequestError(ErrorKind.OVERLOADED, "many wait", code="queue_full")
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 429
    assert not tokenized
    # what is wrong with a request is told however busy the server is
    assert (await client.post("/v1/completions", json={**COMPLETION, "top_p": 7})).status_code == 400
    engine.lack_of_room = None
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
    assert tokenized


async def test_a_client_that_leaves(web: Web, lines: Any) -> None:
    web.engine.script = hang_after(1)
    _, writer = await send(web, "/v1/completions", COMPLETION)
    await within(web.engine.saw_submit.wait())
    writer.close()
    await within(web.service.wait_idle())
    assert [(line["end"], line["reason"]) for line in lines()] == [("aborted", "client")]
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert await metric(client, "requests_aborted_total", reason="client") == 1


async def test_a_deadline_that_passes(running: Running, lines: Any) -> None:
    running.engine.script = hang_after(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in running.stub.Generate(pb.GenerateRequest(model="tiny", text="x"), timeout=0.3):
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await within(running.service.wait_idle())
    assert [(line["api"], line["end"], line["reason"]) for line in lines()] == [("grpc", "aborted", "deadline")]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_after_the_first_token(web: Web, lines: Any, stream: bool) -> None:
    web.engine.script = fail_after(2)
    reader, writer = await send(web, "/v1/completions", {**COMPLETION, "stream": stream})
    await within(reader.readuntil(b"internal_error"))
    writer.close()
    await within(web.service.wait_idle())
    assert [(line["end"], line["reason"], line["completion_tokens"]) for line in lines()] == [("aborted", "failure", 2)]
    async with httpx.AsyncClient(base_url=web.url) as client:
        assert await metric(client, "requests_aborted_total", reason="failure") == 1


async def test_times_and_tokens_of_finished_calls(client: httpx.AsyncClient) -> None:
    for _ in range(3):
        await client.post("/v1/completions", json={**COMPLETION, "n": 2})
    assert await metric(client, "requests_finished_total", reason="stop") == 6
    assert await metric(client, "generation_tokens_total") == 3 * 2 * 4
    assert await metric(client, "prompt_tokens_total") == 3 * 3
    assert await metric(client, "time_to_first_token_seconds_count") == 6
    assert await metric(client, "inter_token_latency_seconds_count") == 6 * 3
    assert await metric(client, "request_latency_seconds_count") == 3


async def test_every_metric_is_there_from_the_start(client: httpx.AsyncClient) -> None:
    """A dashboard that asks for a series before its first event must find a 0."""
    families = {f.name: f for f in text_string_to_metric_families((await client.get("/metrics")).text)}
    reasons = {
        "requests_finished": {"stop", "length"},
        "requests_aborted": {"client", "deadline", "shutdown", "slow_reader", "failure"},
        "requests_rejected": {
            "invalid", "not_found", "unauthenticated", "too_large", "late", "queue_full", "key_requests", "key_tokens",
            "unavailable", "deadline", "internal",
        },
    }  # fmt: skip
    for name, expected in reasons.items():
        samples = families[f"quire_{name}"].samples
        assert {sample.labels["reason"] for sample in samples} == expected and {s.value for s in samples} == {0}
    for name in ("time_to_first_token", "inter_token_latency", "request_latency", "request_queue", "request_prefill",
                 "request_decode"):  # fmt: skip
        assert families[f"quire_{name}_seconds"].type == "histogram"
    assert not any(name.endswith("_created") for name in families)


async def test_the_same_request_id_twice_at_once(web: Web) -> None:
    """It names a call in logs and answers, and nothing else."""
    web.engine.script = hang_after(1)
    calls = []
    for _ in range(2):
        web.engine.saw_submit.clear()
        calls.append(await send(web, "/v1/completions", {**COMPLETION, "stream": True}, {"x-request-id": "same"}))
        await within(web.engine.saw_submit.wait())
    assert len({request.id for request in web.engine.requests}) == 2
    calls[0][1].close()
    await within(web.engine.saw_cancel.wait())
    assert len(web.engine.running) == 1
    calls[1][1].close()
    await within(web.service.wait_idle())


def test_log_lines_are_json_whatever_happens() -> None:
    record = logging.LogRecord("n", logging.ERROR, "p", 1, 'a "quoted" %s\nline', ("é",), None)
    assert json.loads(JsonFormatter().format(record))["message"] == 'a "quoted" é\nline'
    try:
        raise ValueError("inner")
    except ValueError as error:
        record = logging.LogRecord("n", logging.ERROR, "p", 1, "x", (), (type(error), error, error.__traceback__))
    text = JsonFormatter().format(record)
    assert "\n" not in text and "ValueError: inner" in json.loads(text)["exception"]
