"""Calls as OpenTelemetry traces, sent to a collector over OTLP. They are made when a call is over, from its record, so
that a call costs nothing while it runs; names are those of the conventions for generative AI. Never a word of text.

The SDK is an extra, `quire[traces]`, and imported only where traces are asked for.
"""

import asyncio
import importlib.metadata
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING

from engine.errors import StartupError
from server.record import CallRecord, End

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import AttributeValue

PATH = "/v1/traces"
CLOSE_SECONDS = 2.0
NANOSECONDS = 10**9


class Traces:
    """A span for each call, with spans for the parts of it whose bounds are known."""

    def __init__(self, processor: "SpanProcessor"):
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = importlib.metadata.version("quire")
        resource = Resource.create({"service.version": version})  # with what OTEL_ variables say
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "quire"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("quire", version)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> "Traces":
        """Sent to the collector at a base URL. Raises StartupError where the SDK is not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise StartupError(
                "--otlp-endpoint needs the OpenTelemetry SDK, which is not installed; install the extra quire[traces] "
                "(pip install -e '.[traces]' in a clone), or leave out the option and OTEL_EXPORTER_OTLP_ENDPOINT"
            ) from error
        base = endpoint.rstrip("/")
        url = base if base.endswith(PATH) else base + PATH
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))

    def hear_end(self, record: CallRecord) -> None:
        """A call is over."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        assert record.closed is not None
        parent = self._propagator.extract({"traceparent": record.caller.traceparent or ""})
        operation = "chat" if record.is_chat else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {record.model}".rstrip(),
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, **_attributes(record)},
            start_time=_wall(record, record.opened),
        )
        if record.end is not End.FINISHED:
            span.set_status(Status(StatusCode.ERROR, f"{record.end.value}: {record.reason}"))
        inside = set_span_in_context(span, parent)
        for name, (start, end) in _parts(record).items():
            part = self._tracer.start_span(name, context=inside, start_time=_wall(record, start))
            part.end(_wall(record, end))
        span.end(_wall(record, record.closed))

    async def close(self) -> None:
        """Send what is left, if that is possible at once: a collector that is down holds nothing up."""
        thread = Thread(target=self._provider.shutdown, name="quire-traces", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, CLOSE_SECONDS)


def _attributes(record: CallRecord) -> "Mapping[str, AttributeValue]":
    attributes: dict[str, AttributeValue] = {
        "gen_ai.provider.name": "quire",
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(choice.num_tokens for choice in record.choices),
        "quire.request_id": record.caller.request_id,
        "quire.api": record.caller.api,
    }
    if record.model:
        attributes["gen_ai.request.model"] = record.model
    if len(record.choices) > 1:
        attributes["gen_ai.request.choice.count"] = len(record.choices)
    if reasons := [choice.finished.reason.value for choice in record.choices if choice.finished is not None]:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if usages := record.usages:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usages[0].num_cached_tokens
    if record.end is not End.FINISHED:
        attributes["error.type"] = record.reason
    return attributes


def _parts(record: CallRecord) -> dict[str, tuple[float, float]]:
    """From when to when the call waited, and was in prefill and decode, in the monotonic clock's seconds. Several
    choices count as one: from the first that begins something to the last that ends it."""
    starts = [c.finished.started for c in record.choices if c.finished and c.finished.started is not None]
    lasts = [choice.last_token for choice in record.choices if choice.last_token is not None]
    first, parts = record.first_token, {}
    if starts and record.submitted is not None:
        # a step may begin while the request is still on its way into the record
        started = max(min(starts), record.submitted)
        parts["queue"] = (record.submitted, started)
        if first is not None:
            parts["prefill"] = (started, max(started, first))
    if first is not None:
        parts["decode"] = (first, max(lasts))
    return parts


def _wall(record: CallRecord, time: float) -> int:
    """Nanoseconds since 1970 of a time of the monotonic clock."""
    return int(record.started_at * NANOSECONDS) + round((time - record.opened) * NANOSECONDS)
