"""Traces of calls: their spans in time, what they say, what they never say, and collectors that are not there."""

import socket
import sys
import time
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import server.lifecycle
from engine.errors import ErrorKind, RequestError, StartupError
from engine.request import Delta, Event, Finished, FinishReason, Request, Usage
from proto.quire.v1 import inference_pb2 as pb
from server.cli import main
from server.config import ServerConfig
from server.keys import ANYONE
from server.record import Caller, CallRecord, ChoiceRecord
from server.service import Service
from server.tracing import Traces
from tests.fakes import FakeEngine, hang_after
from tests.server.conftest import Running, Web, within
from tests.server.wire import COMPLETION, send

CANARY = "canary-9317"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SECOND = 10**9


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(exporter: InMemorySpanExporter) -> Traces:
    return Traces(SimpleSpanProcessor(exporter))


@pytest.fixture
async def service(engine: FakeEngine, traces: Traces) -> Service:
    return Service(engine, traces=traces)  # type: ignore[arg-type]


def finished(started: float | None, tokens: int, reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(reason, Usage(12, 8, tokens), started=started)


def record(**more: object) -> CallRecord:
    """A call that arrived at 100 s on the monotonic clock and 5 000 s on the wall's."""
    caller = Caller("http", ANYONE, "mine", TRACEPARENT)
    return CallRecord(caller, **({"opened": 100.0, "started_at": 5000.0, "closed": 109.0} | more))  # type: ignore[arg-type]


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    found = exporter.get_finished_spans()
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def bounds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time / SECOND, span.end_time / SECOND


def test_parts_of_a_call_in_time(exporter: InMemorySpanExporter, traces: Traces) -> None:
    choices = [
        ChoiceRecord(103.5, 106.0, 5, finished(102.25, 5)),
        ChoiceRecord(103.0, 108.5, 7, finished(102.5, 7, FinishReason.LENGTH)),
    ]
    traces.hear_end(record(model="tiny", is_chat=True, submitted=101.0, num_prompt_tokens=12, choices=choices))
    found = spans(exporter)
    assert {name: bounds(span) for name, span in found.items()} == {
        "chat tiny": (5000.0, 5009.0),
        "queue": (5001.0, 5002.25),
        "prefill": (5002.25, 5003.0),
        "decode": (5003.0, 5008.5),
    }
    call = found.pop("chat tiny")
    assert call.context and call.parent and call.kind is SpanKind.SERVER and call.status.status_code is StatusCode.UNSET
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    for part in found.values():
        assert part.context and part.context.trace_id == call.context.trace_id
        assert part.parent and part.parent.span_id == call.context.span_id
    assert call.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 12,
        "quire.request_id": "mine",
        "quire.api": "http",
    }


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({}, {}),
        ({"submitted": 101.0}, {}),
        ({"submitted": 101.0, "choices": [ChoiceRecord()]}, {}),
        ({"submitted": 101.0, "choices": [ChoiceRecord(103.0, 104.0, 2)]}, {"decode": (5003.0, 5004.0)}),
        ({"submitted": 101.0, "choices": [ChoiceRecord(None, None, 0, finished(102.0, 0))]}, {"queue": (5001, 5002)}),
        # the step began before the record knew of the submission
        (
            {"submitted": 101.0, "choices": [ChoiceRecord(102.0, 102.0, 1, finished(100.5, 1))]},
            {"queue": (5001.0, 5001.0), "prefill": (5001.0, 5002.0), "decode": (5002.0, 5002.0)},
        ),
    ],
)  # fmt: skip
def test_only_parts_whose_bounds_are_known(
    exporter: InMemorySpanExporter, traces: Traces, more: dict[str, object], parts: dict[str, tuple[float, float]]
) -> None:
    traces.hear_end(record(**more))
    found = {name: bounds(span) for name, span in spans(exporter).items()}
    assert found == {"text_completion": (5000.0, 5009.0)} | parts


@pytest.mark.parametrize("traceparent", [None, "", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", "x" * 10_000])
def test_a_call_without_a_trace_begins_one(
    exporter: InMemorySpanExporter, traces: Traces, traceparent: str | None
) -> None:
    call = record()
    call.caller = Caller("grpc", ANYONE, "mine", traceparent)
    traces.hear_end(call)
    (span,) = exporter.get_finished_spans()
    assert span.parent is None and span.context and span.context.trace_id != 0


def test_a_client_that_does_not_sample_is_not_traced(exporter: InMemorySpanExporter, traces: Traces) -> None:
    call = record()
    call.caller = Caller("grpc", ANYONE, "mine", TRACEPARENT[:-2] + "00")
    traces.hear_end(call)
    assert exporter.get_finished_spans() == ()


async def test_calls_over_both_protocols(
    client: httpx.AsyncClient, running: Running, exporter: InMemorySpanExporter
) -> None:
    before = time.time()
    await client.post("/v1/completions", json={**COMPLETION, "n": 2}, headers={"traceparent": TRACEPARENT})
    after = time.time()
    over_http = {span.name: span for span in exporter.get_finished_spans()}
    assert (
        before <= bounds(over_http["text_completion tiny"])[0] <= bounds(over_http["text_completion tiny"])[1] <= after
    )
    request = pb.GenerateRequest(model="tiny", text="hi")
    await within(running.stub.Generate(request, metadata=[("traceparent", TRACEPARENT)]).read())
    await within(running.service.wait_idle())
    calls = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert [span.attributes and span.attributes["quire.api"] for span in calls] == ["http", "grpc"]
    assert {span.parent and f"{span.parent.span_id:016x}" for span in calls} == {PARENT_ID}


async def test_no_text_of_a_call_is_in_its_trace(
    client: httpx.AsyncClient, engine: FakeEngine, exporter: InMemorySpanExporter
) -> None:
    async def speak(request: Request) -> AsyncIterator[Event]:
        yield Delta(CANARY, (1,))
        yield Finished(FinishReason.STOP, Usage(1, 0, 1), CANARY)

    engine.script = speak
    for body in ({"prompt": CANARY}, {"prompt": "x", "temperature": CANARY}, {"prompt": "x", CANARY: CANARY}):
        await client.post("/v1/completions", json={"model": "tiny", **body, "user": CANARY, "stop": [CANARY]})
    message = {"role": "user", "content": CANARY}
    await client.post("/v1/chat/completions", json={"model": "tiny", "messages": [message], "stream": True})
    await client.post("/v1/completions", json={"model": CANARY, "prompt": "x"})
    found = exporter.get_finished_spans()
    assert len([span for span in found if span.kind is SpanKind.SERVER]) == 5
    assert CANARY not in "".join(span.to_json() for span in found)


@pytest.mark.parametrize(
    ("body", "reason"), [({"model": "tiny"}, "invalid"), ({"model": "x", "prompt": "x"}, "not_found")]
)
async def test_refused_calls(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter, body: dict[str, str], reason: str
) -> None:
    await client.post("/v1/completions", json=body)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.status.description == f"rejected: {reason}"
    assert span.attributes and span.attributes["error.type"] == reason


async def test_aborted_calls(web: Web, exporter: InMemorySpanExporter) -> None:
    web.engine.script = hang_after(2)
    _, writer = await send(web, "/v1/completions", COMPLETION)
    await within(web.engine.saw_submit.wait())
    writer.close()
    await within(web.service.wait_idle())
    (call,) = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert call.status.status_code is StatusCode.ERROR and call.status.description == "aborted: client"


async def test_a_failure_of_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, exporter: InMemorySpanExporter
) -> None:
    engine.refusal = RequestError(ErrorKind.OVERLOADED, "many wait", code="queue_full")
    await client.post("/v1/completions", json=COMPLETION)
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "rejected: queue_full"


class Collector(HTTPServer):
    """Takes one export."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                self.paths.append(handler.path)
                self.bodies.append(handler.rfile.read(int(handler.headers["Content-Length"])))
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/base"])
async def test_what_a_collector_gets(path: str) -> None:
    with Collector() as collector:
        thread = Thread(target=collector.handle_request)
        thread.start()
        traces = Traces.to(f"http://127.0.0.1:{collector.server_address[1]}{path}")
        traces.hear_end(record(model="tiny"))
        await traces.close()
        thread.join(5)
    assert collector.paths == ["/base/v1/traces" if path == "/base" else "/v1/traces"]
    (batch,) = ExportTraceServiceRequest.FromString(collector.bodies[0]).resource_spans
    names = {item.key: item.value.string_value for item in batch.resource.attributes}
    assert names["service.name"] == "quire"
    (span,) = batch.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("text_completion tiny", TRACE_ID, PARENT_ID)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (5000 * SECOND, 5009 * SECOND)


def test_the_name_of_the_service_is_the_operators(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    Traces(SimpleSpanProcessor(exporter)).hear_end(record())
    assert exporter.get_finished_spans()[0].resource.attributes["service.name"] == "ours"


@pytest.mark.parametrize("is_listening", [False, True], ids=["nobody", "silent"])
async def test_a_collector_that_is_down_holds_nothing_up(is_listening: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if not is_listening:
            listener.close()
        traces = Traces.to(f"http://127.0.0.1:{port}")
        start = time.monotonic()
        for _ in range(600):  # more than a batch: the exporter is at work
            traces.hear_end(record(model="tiny"))
        made = time.monotonic()
        await traces.close()
        closed = time.monotonic()
    # an export takes up to 10 s; the bound of closing is 2 s
    assert made - start < 2 and closed - made < 4


def test_without_the_sdk_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert main(["serve", "m", "--otlp-endpoint", "http://127.0.0.1:4318"], {}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire: --otlp-endpoint needs") and "quire[traces]" in line


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://a:4317", "http://", "http://a b"])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(StartupError, match="--otlp-endpoint must be a URL"):
        ServerConfig(otlp_endpoint=endpoint)


def test_the_variable_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[ServerConfig] = []
    monkeypatch.setattr(server.lifecycle, "serve", lambda _, config: configs.append(config) or 0)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"}
    assert main(["serve", "m"], environ) == main(["serve", "m", "--otlp-endpoint", "http://b"], environ) == 0
    assert main(["serve", "m"], {}) == main(["serve", "m"], {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) == 0
    assert [config.otlp_endpoint for config in configs] == ["http://a:4318", "http://b", None, None]
