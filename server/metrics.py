"""GET /metrics: the same snapshot for Prometheus, in its text format or as OpenMetrics."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, exposition
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from engine.kv.stats import SECONDS, HistogramSnapshot, PoolSnapshot, Reclaimed
from server.service import Service

COUNTERS = {
    "num_query_tokens": ("quire_prefix_query_tokens", "Prompt tokens looked up in the prefix cache, once a request."),
    "num_hit_tokens": ("quire_prefix_hit_tokens", "Of the tokens looked up, those found."),
    "num_host_hit_tokens": ("quire_prefix_host_hit_tokens", "Of the tokens found, those restored from host memory."),
    "num_sealed_pages": ("quire_pages_sealed", "Full pages that were quantized."),
    "num_adopted_pages": ("quire_pages_adopted", "Full pages given up for a cached one of equal content."),
    "num_dropped_pages": ("quire_pages_dropped", "Pages of running sequences that a shrink policy dropped."),
    "num_saved_pages": ("quire_pages_saved", "Pages copied to host memory, those of swapped sequences included."),
    "num_restored_pages": ("quire_pages_restored", "Pages copied back from host memory."),
    "num_preemptions": ("quire_preemptions", "Running sequences that had to give up their pages."),
    "num_swaps": ("quire_swaps", "Of the preemptions, those whose pages moved to host memory whole."),
    "num_lost_tokens": (
        "quire_preempted_lost_tokens",
        "Computed tokens whose pages a preemption took out of the pool.",
    ),
}
HISTOGRAMS = {
    "lifetime": ("quire_page_lifetime", "From caching a page to reclaiming it."),
    "idle": ("quire_page_idle", "From the last use of a cached page to reclaiming it."),
    "reuse_gap": ("quire_page_reuse_gap", "From the last use of a cached page to its next hit."),
}
PATIENCE_SECONDS = 2.0  # well below the 10 s after which Prometheus gives up


class Exporter:
    """Renders the metrics. Those of the pool are read between two steps; during a step that takes longer than
    `PATIENCE_SECONDS` they are those of the last time, so that a step that never ends can be seen.
    """

    def __init__(self, service: Service):
        self._service = service
        self._snapshot: PoolSnapshot | None = None
        self._asking: asyncio.Task[None] | None = None

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, for a client whose Accept header is `accept`. Raises the RequestError of
        an engine that has stopped."""
        step_seconds = self._service.engine.step_seconds  # before the pause between steps in which the pool is read
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._inspect())
        await asyncio.wait({self._asking}, timeout=PATIENCE_SECONDS)
        if self._asking.done():
            self._asking.result()
        registry = CollectorRegistry()
        if self._snapshot is not None:
            registry.register(PoolCollector(self._snapshot))
        registry.register(ServerCollector(self._service, step_seconds))
        ProcessCollector(registry=registry)
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return exposition.generate_latest(registry), exposition.CONTENT_TYPE_PLAIN_0_0_4

    async def _inspect(self) -> None:
        self._snapshot = await self._service.engine.inspect()


class PoolCollector(Collector):
    """The metrics of one snapshot. All of them exist from the start, at 0."""

    def __init__(self, snapshot: PoolSnapshot):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield GaugeMetricFamily("quire_requests_running", "Requests that run.", snapshot.num_running)
        yield GaugeMetricFamily("quire_requests_waiting", "Requests that wait to run.", snapshot.num_waiting)
        yield from self._tiers()
        yield GaugeMetricFamily("quire_prefix_nodes", "Pages that the prefix cache knows.", snapshot.num_cached_nodes)
        yield GaugeMetricFamily(
            "quire_longest_shared_prefix_tokens",
            "Length of the longest prefix that several sequences hold.",
            max((prefix.num_tokens for prefix in snapshot.shared_prefixes), default=0),
        )
        for counter, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, snapshot.counters[counter])
        reclaimed = CounterMetricFamily(
            "quire_pages_reclaimed",
            "Cached pages that left their tier, by what needed the room; detached: the page before them went.",
            labels=["reason"],
        )
        for reason in Reclaimed:
            reclaimed.add_metric([reason.value], snapshot.reclaimed.get(reason.value, 0))
        yield reclaimed
        for key, (name, text) in HISTOGRAMS.items():
            buckets = _buckets(snapshot.histograms[key])
            yield HistogramMetricFamily(name, text, buckets, snapshot.histograms[key].total, unit="seconds")

    def _tiers(self) -> Iterator[Metric]:
        labels = ["tier", "state"]
        pages = GaugeMetricFamily(
            "quire_pool_pages",
            "Pages of each tier by state, for host memory records of a sealed page's size; a tier's states sum to it.",
            labels=labels,
        )
        tokens = GaugeMetricFamily(
            "quire_pool_tokens", "Tokens that the pages of each tier and state hold.", labels=labels
        )
        size = GaugeMetricFamily(
            "quire_pool_bytes", "Memory of the pages of each tier by state.", labels=labels, unit="bytes"
        )
        for tier in self._snapshot.tiers:
            for state, num_pages in tier.pages.items():
                pages.add_metric([tier.name, state], num_pages)
                tokens.add_metric([tier.name, state], tier.tokens.get(state, 0))
                size.add_metric([tier.name, state], num_pages * tier.page_bytes)
        yield from (pages, tokens, size)


class ServerCollector(Collector):
    """What the server knows beside the pool. `step_seconds`: of the step that ran when the metrics were asked for."""

    def __init__(self, service: Service, step_seconds: float):
        self._service = service
        self._step_seconds = step_seconds

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        yield GaugeMetricFamily(
            "quire_ready", "1: calls are taken; 0: the server shuts down, or its engine failed.", self._service.is_ready
        )
        yield GaugeMetricFamily(
            "quire_step_running_seconds", "How long the current step takes so far.", self._step_seconds
        )
        yield GaugeMetricFamily(
            "quire_queue_tokens", "Prompt tokens of requests that wait to run.", engine.num_waiting_tokens
        )
        build = GaugeMetricFamily(
            "quire_build_info", "1; what runs.", labels=["version", "model", "kv_format", "device"]
        )
        info = engine.info
        build.add_metric([self._service.version, info.model_name, info.recipe, info.device], 1)
        yield build
        yield from self._service.telemetry.collect()


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    """Counts of each bucket and all below it, named by their bounds."""
    bounds = [*map(str, SECONDS), "+Inf"]
    return [(bound, sum(histogram.counts[: place + 1])) for place, bound in enumerate(bounds)]
