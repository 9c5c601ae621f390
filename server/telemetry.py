"""Prometheus metrics of calls. All of them exist from the start, at 0; none has a label that clients choose."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric

from engine.errors import RequestError
from server.record import SLOW_READER, CallRecord, End

FINISHED = ("stop", "length")
ABORTED = ("client", "deadline", "shutdown", SLOW_READER, "failure")
REJECTED = (
    "invalid", "not_found", "unauthenticated", "too_large", "late", "queue_full", "key_requests", "key_tokens",
    "unavailable", "deadline", "internal",
)  # fmt: skip
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Telemetry:
    """Counts calls and times them. For one event loop."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, reasons: tuple[str, ...] = ()) -> Counter:
            made = Counter(name, text, ["reason"] if reasons else [], registry=registry)
            for reason in reasons:
                made.labels(reason)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, unit="seconds", buckets=buckets, registry=registry)

        self._prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens of finished calls, cached ones included.")
        self._generated_tokens = counter("quire_generation_tokens", "Tokens that were generated.")
        self._finished = counter("quire_requests_finished", "Choices that ended as asked, by reason.", FINISHED)
        self._aborted = counter("quire_requests_aborted", "Calls that ended early, by who ended them.", ABORTED)
        self._rejected = counter("quire_requests_rejected", "Calls that were refused, by reason.", REJECTED)
        self._first_token = histogram(
            "quire_time_to_first_token", "From a call's arrival to the first token of each choice.", LONG
        )
        self._inter_token = histogram("quire_inter_token_latency", "Between two tokens of a choice.", SHORT)
        self._latency = histogram("quire_request_latency", "From a call's arrival to its end, as asked.", LONG)
        self._queue = histogram("quire_request_queue", "From admission to the first step of a choice.", LONG)
        self._prefill = histogram("quire_request_prefill", "From the first step of a choice to its first token.", LONG)
        self._decode = histogram("quire_request_decode", "From the first to the last token of a choice.", LONG)

    def hear_token(self, gap: float | None, since_arrival: float) -> None:
        """A choice has one more token, `gap` seconds after its last one; None: it is its first."""
        self._generated_tokens.inc()
        if gap is None:
            self._first_token.observe(since_arrival)
        else:
            self._inter_token.observe(gap)

    def hear_refusal(self, error: RequestError) -> None:
        """Something was refused before it was a call."""
        self._rejected.labels(error.kind.value).inc()

    def hear_end(self, record: CallRecord) -> None:
        """A call is over."""
        if record.end is not End.FINISHED:
            counter, known = (self._aborted, ABORTED) if record.end is End.ABORTED else (self._rejected, REJECTED)
            counter.labels(record.reason if record.reason in known else known[-1]).inc()
            return
        assert record.closed is not None and record.submitted is not None
        self._prompt_tokens.inc(record.num_prompt_tokens)
        self._latency.observe(record.closed - record.opened)
        for choice in record.choices:
            finished = choice.finished
            assert finished is not None
            self._finished.labels(finished.reason.value).inc()
            if finished.started is not None:
                self._queue.observe(max(0.0, finished.started - record.submitted))
                if choice.first_token is not None and choice.last_token is not None:
                    self._prefill.observe(max(0.0, choice.first_token - finished.started))
                    self._decode.observe(choice.last_token - choice.first_token)

    def totals(self) -> dict[str, float]:
        """What rates are worked out from: tokens, and the times to first tokens."""
        metrics = (self._prompt_tokens, self._generated_tokens, self._first_token)
        found = {s.name: s.value for metric in metrics for family in metric.collect() for s in family.samples}
        return {
            "prompt_tokens": found["quire_prompt_tokens_total"],
            "generated_tokens": found["quire_generation_tokens_total"],
            "first_tokens": found["quire_time_to_first_token_seconds_count"],
            "first_token_seconds": found["quire_time_to_first_token_seconds_sum"],
        }

    def collect(self) -> Iterator[Metric]:
        """Without the times at which series were made, which the library adds."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
