"""How many slots and sealed pages a memory holds, and how many sequences that is. No torch."""

from dataclasses import dataclass

from engine.errors import StartupError
from kernels.format.layout import PageLayout


def num_sequence_slots(sink_pages: int, window_pages: int) -> int:
    """Slots that one sequence holds at most: its sink pages, its open page, its window, and while its prompt is
    computed the pages of a step, which read only what lies in slots."""
    return 1 + sink_pages + 2 * window_pages


def num_slots(max_num_seqs: int, sink_pages: int, window_pages: int = 0) -> int:
    """Slots for `max_num_seqs` sequences, the null slot, and some to spare for cached sink pages."""
    used = max_num_seqs * num_sequence_slots(sink_pages, window_pages)
    return 1 + used + max(8, -(-used // 10))


def num_sequence_pages(length: int, page_tokens: int, sink_pages: int) -> int:
    """Sealed pages that one sequence of `length` tokens needs at most."""
    return 1 + max(0, (length - 1) // page_tokens - sink_pages)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Counts include the null page and the null slot; bytes are those of both pools."""

    num_pages: int
    num_slots: int
    num_bytes: int


def smallest_pool(layout: PageLayout, max_num_seqs: int, max_model_len: int, num_full: int = 1) -> PoolSize:
    """The pool that holds `num_full` sequences of full length beside slots for `max_num_seqs`."""
    recipe = layout.recipe
    slots = num_slots(max_num_seqs, recipe.sink_pages, recipe.window_pages)
    pages = 1 + num_full * num_sequence_pages(max_model_len, recipe.page_tokens, recipe.sink_pages)
    return PoolSize(pages, slots, slots * layout.slot_bytes + pages * layout.page_bytes)


def fit_pool(layout: PageLayout, memory: int, max_num_seqs: int, max_model_len: int) -> PoolSize:
    """All that fits in `memory` bytes. Raises StartupError where not even one full-length sequence does."""
    least = smallest_pool(layout, max_num_seqs, max_model_len)
    if memory < least.num_bytes:
        raise StartupError(
            f"--kv-memory is {memory} bytes, too small for one request of {max_model_len} tokens with slots for "
            f"{max_num_seqs} sequences; the smallest that works is {least.num_bytes} bytes "
            "(or lower --max-model-len or --max-num-seqs)"
        )
    pages = (memory - least.num_slots * layout.slot_bytes) // layout.page_bytes
    return PoolSize(pages, least.num_slots, least.num_slots * layout.slot_bytes + pages * layout.page_bytes)


def max_full_sequences(layout: PageLayout, memory: int, length: int) -> int:
    """Sequences of `length` tokens that fit in `memory` at once, with `max_num_seqs` set to just that number."""

    def fits(count: int) -> bool:
        return smallest_pool(layout, count, length, num_full=count).num_bytes <= memory

    low, high = 0, 1
    while fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
