"""The KV pool as front ends show it: one snapshot, or one after the other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from engine.errors import invalid
from engine.kv.stats import SECONDS, HistogramSnapshot, PoolSnapshot, Reclaimed, TierSnapshot
from server.latest import Latest

MIN_INTERVAL_MS, MAX_INTERVAL_MS, DEFAULT_INTERVAL_MS = 100, 60_000, 1000
FLAGS = {None: False, "false": False, "true": True}


def read_flag(query: Mapping[str, str], name: str) -> bool:
    """Whether the query says that `name` is true. Raises RequestError."""
    given = query.get(name)
    if given not in FLAGS:
        raise invalid(f"{name} must be true or false", name)
    return FLAGS[given]


def check_interval(milliseconds: int | None) -> float:
    """The pause between two snapshots in seconds. Raises RequestError."""
    if milliseconds is None:
        milliseconds = DEFAULT_INTERVAL_MS
    if not MIN_INTERVAL_MS <= milliseconds <= MAX_INTERVAL_MS:
        message = f"interval_ms must be an integer from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
        raise invalid(message, "interval_ms")
    return milliseconds / 1000


def read_interval(query: Mapping[str, str]) -> float:
    """As `check_interval`, of a query."""
    given = query.get("interval_ms")
    if given is None:
        return check_interval(None)
    return check_interval(int(given) if given.isascii() and given.isdecimal() and len(given) < 9 else -1)


class PoolWatch:
    """Snapshots for those who watch. However many they are, the engine is asked once in `MIN_INTERVAL_MS`."""

    def __init__(self, inspect: Callable[[], Coroutine[Any, Any, PoolSnapshot]], check_ready: Callable[[], None]):
        self._latest = Latest(inspect, MIN_INTERVAL_MS / 1000)
        self._check_ready = check_ready

    async def snapshots(self, interval: float, check_viewer: Callable[[], object]) -> AsyncIterator[PoolSnapshot]:
        """One now, then one every `interval` seconds. Raises RequestError UNAVAILABLE when the server shuts down, and
        what `check_viewer` raises: somebody whose key is taken away would else watch for ever."""
        while True:
            self._check_ready()
            check_viewer()
            yield await self._latest.get()
            await asyncio.sleep(interval)


def pool_object(snapshot: PoolSnapshot, *, is_checked: bool) -> dict[str, Any]:
    """Pages, tokens and bytes by tier and state, then what happened since the start.

    Tokens of `prefix_cache` are counted once a request. Bounds of histograms are upper and inclusive; the last count is
    of what is longer than all of them. `shared_prefixes` are those that several sequences hold now.
    """
    counters = snapshot.counters
    queries, hits = counters["num_query_tokens"], counters["num_hit_tokens"]
    return {
        **({"check": "ok"} if is_checked else {}),
        "requests": {"running": snapshot.num_running, "waiting": snapshot.num_waiting},
        "tiers": {tier.name: _tier(tier) for tier in snapshot.tiers},
        "prefix_cache": {
            "nodes": snapshot.num_cached_nodes,
            "query_tokens": queries,
            "hit_tokens": hits,
            "host_hit_tokens": counters["num_host_hit_tokens"],
            "hit_rate": hits / queries if queries else None,
        },
        "pages": {
            "sealed": counters["num_sealed_pages"],
            "adopted": counters["num_adopted_pages"],
            "dropped": counters["num_dropped_pages"],
            "saved": counters["num_saved_pages"],
            "restored": counters["num_restored_pages"],
        },
        "reclaimed_pages": {reason.value: snapshot.reclaimed.get(reason.value, 0) for reason in Reclaimed},
        "preemptions": {
            "total": counters["num_preemptions"],
            "swaps": counters["num_swaps"],
            "lost_tokens": counters["num_lost_tokens"],
        },
        "shared_prefixes": [
            {"tokens": prefix.num_tokens, "sequences": prefix.num_sequences} for prefix in snapshot.shared_prefixes
        ],
        "histograms": {
            "bounds_seconds": list(SECONDS),
            **{name: _histogram(histogram) for name, histogram in snapshot.histograms.items()},
        },
    }


def _tier(tier: TierSnapshot) -> dict[str, Any]:
    return {
        "page_bytes": tier.page_bytes,
        "total": _amount(tier, tier.num_total, sum(tier.tokens.values())),
        "states": {
            state: _amount(tier, num_pages, tier.tokens.get(state, 0)) for state, num_pages in tier.pages.items()
        },
    }


def _amount(tier: TierSnapshot, num_pages: int, num_tokens: int) -> dict[str, int]:
    return {tier.unit: num_pages, "tokens": num_tokens, "bytes": num_pages * tier.page_bytes}


def _histogram(histogram: HistogramSnapshot) -> dict[str, Any]:
    return {"count": sum(histogram.counts), "sum_seconds": histogram.total, "counts": list(histogram.counts)}
