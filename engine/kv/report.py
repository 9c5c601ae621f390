"""The pool as one immutable snapshot. No torch."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.cache import PageCache
from engine.kv.pages import PagePools
from engine.kv.stats import PoolSnapshot, SharedPrefix, TierSnapshot
from engine.sequence import Sequence
from kernels.format.layout import PageRef

NUM_SHARED_PREFIXES = 10


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Bytes of a sealed page (and of a host record), and of a slot."""

    page_bytes: int
    slot_bytes: int


def snapshot(
    pools: PagePools, running: Iterable[Sequence], waiting: Iterable[Sequence], num_waiting: int, sizes: PageSizes
) -> PoolSnapshot:
    """Call between steps. `num_waiting` counts siblings, `waiting` does not list them."""
    cache, stats, running = pools.cache, pools.cache.stats, list(running)
    return PoolSnapshot(
        tiers=(
            sealed_tier(pools, sizes),
            open_tier(pools, running, sizes),
            _host_tier(pools, list(waiting), sizes),
        ),
        num_running=len(running),
        num_waiting=num_waiting,
        num_cached_nodes=len(cache.nodes) + cache.host.num_nodes,
        counters=stats.counters(),
        reclaimed={reason.value: count for reason, count in stats.reclaimed.items()},
        histograms=stats.histograms(),
        shared_prefixes=tuple(_shared_prefixes(cache, running, pools.page_tokens)),
    )


def sealed_tier(pools: PagePools, sizes: PageSizes) -> TierSnapshot:
    sealed = pools.cache.sealed
    pages = {"free": sealed.num_free, "held": sealed.num_held, "cached": sealed.num_cached}
    tokens = {state: count * pools.page_tokens for state, count in pages.items() if state != "free"}
    return TierSnapshot("sealed", sealed.num_total, sizes.page_bytes, pages, {"free": 0} | tokens)


def open_tier(pools: PagePools, running: list[Sequence], sizes: PageSizes) -> TierSnapshot:
    """Held slots are open pages, which one sequence fills, or full ones: of a window, or sink pages."""
    slots, size = pools.cache.open, pools.page_tokens
    being_filled = [sequence for sequence in running if sequence.num_computed_tokens % size]
    num_window = len({page for sequence in running for page in sequence.window})
    num_sinks = slots.num_held - len(being_filled) - num_window
    pages = {
        "free": slots.num_free,
        "open": len(being_filled),
        "window": num_window,
        "sink": num_sinks,
        "cached": slots.num_cached,
    }
    tokens = {
        "free": 0,
        "open": sum(sequence.num_computed_tokens % size for sequence in being_filled),
        "window": num_window * size,
        "sink": num_sinks * size,
        "cached": slots.num_cached * size,
    }
    return TierSnapshot("open", slots.num_total, sizes.slot_bytes, pages, tokens)


def _host_tier(pools: PagePools, waiting: list[Sequence], sizes: PageSizes) -> TierSnapshot:
    host, size = pools.cache.host.allocator, pools.page_tokens
    pages = {"free": host.num_free, "swapped": host.num_held, "cached": host.num_cached}
    swapped = sum(s.num_computed_tokens - s.num_dropped_pages * size for s in waiting if s.swapped)
    tokens = {"free": 0, "swapped": swapped, "cached": pools.cache.host.num_nodes * size}
    return TierSnapshot("host", host.num_total, sizes.page_bytes, pages, tokens, unit="records")


def _shared_prefixes(cache: PageCache, running: list[Sequence], page_tokens: int) -> list[SharedPrefix]:
    """The prefixes that most sequences hold most tokens of: for each sequence up to its last page that others hold."""

    def is_single(page: PageRef) -> bool:
        return cache.allocator(page.pool).references(page.id) < 2

    found: dict[PageRef, SharedPrefix] = {}
    for sequence in running:
        num_shared = bisect_left(sequence.pages, True, key=is_single)  # shared pages come first
        if num_shared and not sequence.num_dropped_pages:
            last = sequence.pages[num_shared - 1]
            num_sequences = cache.allocator(last.pool).references(last.id)
            found[last] = SharedPrefix(num_shared * page_tokens, num_sequences)
    ranked = sorted(found.values(), key=lambda prefix: -prefix.num_tokens * prefix.num_sequences)
    return ranked[:NUM_SHARED_PREFIXES]
