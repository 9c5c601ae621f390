"""Moves of page memory as values, and the arithmetic of host records. No torch.

Host memory is cut into records of the size of a sealed page. A sealed page takes one record, a slot as many as it
fills; they need not be adjacent.
"""

from dataclasses import dataclass

from engine.errors import StartupError
from kernels.format.layout import PageLayout, PageRef, Pool


@dataclass(frozen=True, slots=True)
class Save:
    """Copy `page` to host `records`."""

    page: PageRef
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restore:
    """Copy host `records` back to `page`, of the same pool as the page that they were saved from."""

    records: tuple[int, ...]
    page: PageRef


@dataclass(frozen=True, slots=True)
class Poison:
    """Fill `page` with bytes that are NaN in every float format, so that whoever reads it by mistake is noticed."""

    page: PageRef


Move = Save | Restore | Poison
"""Moves are done in the order they are given: a record may be restored and then saved to in one list."""


def num_page_bytes(pool: Pool, layout: PageLayout) -> int:
    """Bytes of a page of `pool`."""
    return layout.page_bytes if pool is Pool.SEALED else layout.slot_bytes


def num_page_records(pool: Pool, layout: PageLayout) -> int:
    """Host records that a page of `pool` takes."""
    return -(-num_page_bytes(pool, layout) // layout.page_bytes)


def num_host_records(memory: int, layout: PageLayout) -> int:
    """Records in `memory` bytes. Raises StartupError where not even a sealed page behind its sink pages fits."""
    sinks = layout.recipe.sink_pages
    least = (sinks * num_page_records(Pool.OPEN, layout) + 1) * layout.page_bytes
    if memory < least:
        raise StartupError(
            f"--host-memory is {memory} bytes, too small for one page and the sink pages before it ({sinks}); "
            f"the smallest that works is {least} bytes"
        )
    return memory // layout.page_bytes
