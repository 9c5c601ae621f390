"""Numbers of the pool: counted while it works, shown as one immutable snapshot. No torch."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum

SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)


class Reclaimed(Enum):
    """Why a cached page left the pool that it lay in."""

    SEALED_NEEDED = "sealed_needed"
    SLOT_NEEDED = "slot_needed"
    HOST_NEEDED = "host_needed"
    FLUSHED = "flushed"  # an operator asked for it
    DETACHED = "detached"  # its parent went, because a sequence that still uses it had dropped the parent


class Histogram:
    """Counts of seconds at most `SECONDS[i]`, and of all above."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> "HistogramSnapshot":
        return HistogramSnapshot(tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """`counts[i]`: values in (SECONDS[i - 1], SECONDS[i]]; the last one is for what is larger. `total`: their sum."""

    counts: tuple[int, ...]
    total: float


@dataclass(slots=True)
class PoolStats:
    """Counters since the start. Tokens are counted once a request, at its first admission."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_host_hit_tokens: int = 0  # of the hit ones: those whose pages came back from host memory
    num_sealed_pages: int = 0
    num_adopted_pages: int = 0  # filled by one sequence while another had already cached the same content
    num_dropped_pages: int = 0  # by shrink hooks
    num_saved_pages: int = 0  # copied to host memory, swaps included
    num_restored_pages: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0  # of the preemptions: those that kept their pages in host memory
    num_lost_tokens: int = 0  # computed tokens of preempted sequences whose pages did not stay in the pool
    reclaimed: Counter[Reclaimed] = field(default_factory=Counter)
    lifetime: Histogram = field(default_factory=Histogram)  # from being cached to being reclaimed
    idle: Histogram = field(default_factory=Histogram)  # from the last use to being reclaimed
    reuse_gap: Histogram = field(default_factory=Histogram)  # from the last use to the next hit

    def counters(self) -> dict[str, int]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name.startswith("num_")}

    def histograms(self) -> dict[str, "HistogramSnapshot"]:
        return {name: getattr(self, name).snapshot() for name in ("lifetime", "idle", "reuse_gap")}


@dataclass(frozen=True, slots=True)
class TierSnapshot:
    """Pages of one memory by state; the states sum to `num_total`. `num_tokens`: tokens that pages in each state hold.

    `name` is `sealed`, `open` or `host`. `unit` is `pages`, or for `host` `records`: a sealed page takes one record, a
    sink page several.
    """

    name: str
    num_total: int
    page_bytes: int
    pages: Mapping[str, int]
    tokens: Mapping[str, int]
    unit: str = "pages"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A path of the prefix tree that several sequences hold now: its length, and how many they are."""

    num_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool between two steps. `counters` are the `num_*` fields of `PoolStats`."""

    tiers: tuple[TierSnapshot, ...]
    num_running: int
    num_waiting: int
    num_cached_nodes: int
    counters: Mapping[str, int]
    reclaimed: Mapping[str, int]
    histograms: Mapping[str, HistogramSnapshot]
    shared_prefixes: tuple[SharedPrefix, ...]
