"""Which pages each sequence holds: taken while a step is planned, sealed after it ran, given back at the end. No torch.

For a sequence with `c` computed tokens, pages of P tokens and S sink pages:

    [0, S·P)            sink pages, in slots, kept when full
    [S·P, c // P · P)   sealed pages
    [c // P · P, c)     the open page, in a slot (none where c is a multiple of P)
"""

from collections.abc import Iterable

from engine.kv.allocator import Allocator
from engine.kv.sizing import PoolSize, num_sequence_pages
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool


class PagePools:
    """Both allocators, and the rules that say which pool a page comes from."""

    def __init__(self, size: PoolSize, *, page_tokens: int, sink_pages: int):
        self.sealed = Allocator(size.num_pages)
        self.open = Allocator(size.num_slots)
        self.page_tokens = page_tokens
        self.sink_pages = sink_pages

    def can_admit(self, sequence: Sequence) -> bool:
        """Whether all known tokens of a sequence without pages can be computed, and one page more."""
        needed = num_sequence_pages(len(sequence.tokens), self.page_tokens, self.sink_pages)
        return self.sealed.can_reserve(needed) and self.open.can_reserve(1 + self.sink_pages)

    def admit(self, sequence: Sequence) -> None:
        """Promise the sealed pages that the known tokens fill."""
        sequence.num_reserved_pages = max(0, len(sequence.tokens) // self.page_tokens - self.sink_pages)
        self.sealed.reserve(sequence.num_reserved_pages)

    def can_extend(self, sequence: Sequence, length: int) -> bool:
        """Whether the next `length` tokens find pages."""
        slots, pages = self._needs(sequence, length)
        unpromised = pages - min(pages, sequence.num_reserved_pages)
        return self.open.can_reserve(slots) and self.sealed.can_reserve(unpromised)

    def _needs(self, sequence: Sequence, length: int) -> tuple[int, int]:
        """(slots, sealed pages) that computing the next `length` tokens takes."""
        start, end, size = sequence.num_computed_tokens, sequence.num_computed_tokens + length, self.page_tokens
        filled = max(0, end // size - max(start // size, self.sink_pages))
        if start % size:  # the open page is there; it is sealed into a page when it fills
            return 0, filled
        return -(-end // size) - start // size - filled, filled

    def extend_decode(self, sequence: Sequence) -> PageRef | None:
        """Take what the next token needs. Returns the sealed page that its page goes to after the step, if it fills."""
        position = sequence.num_computed_tokens
        if position % self.page_tokens == 0:
            sequence.pages.append(PageRef(Pool.OPEN, self.open.allocate()))
        if (position + 1) % self.page_tokens or position // self.page_tokens < self.sink_pages:
            return None
        return self._take_sealed(sequence)

    def extend_prefill(self, sequence: Sequence, length: int) -> tuple[PageRef, ...]:
        """Take the pages that a chunk of `length` tokens goes to, in order."""
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + length
        targets = []
        for page in range(start // self.page_tokens, -(-end // self.page_tokens)):
            if page >= self.sink_pages and (page + 1) * self.page_tokens <= end:
                targets.append(self._take_sealed(sequence))
            else:
                targets.append(PageRef(Pool.OPEN, self.open.allocate()))
        sequence.pages.extend(targets)
        return tuple(targets)

    def _take_sealed(self, sequence: Sequence) -> PageRef:
        if sequence.num_reserved_pages:
            sequence.num_reserved_pages -= 1
            self.sealed.unreserve(1)
        return PageRef(Pool.SEALED, self.sealed.allocate())

    def seal(self, sequence: Sequence, target: PageRef) -> None:
        """The last page was sealed into `target`: its slot is free again."""
        self.release(sequence.pages[-1])
        sequence.pages[-1] = target

    def free(self, sequence: Sequence) -> None:
        """Give back everything the sequence holds or was promised."""
        for page in sequence.pages:
            self.release(page)
        sequence.pages.clear()
        self.sealed.unreserve(sequence.num_reserved_pages)
        sequence.num_reserved_pages = 0

    def release(self, page: PageRef) -> None:
        """Give back one page that a sequence lists no more, or not yet."""
        (self.open if page.pool is Pool.OPEN else self.sealed).release(page.id)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless between steps exactly the pages of `sequences` are held."""
        self.open.check()
        self.sealed.check()
        held = [page for sequence in sequences for page in sequence.pages]
        for pool, allocator in ((Pool.OPEN, self.open), (Pool.SEALED, self.sealed)):
            count = len({page.id for page in held if page.pool is pool})
            if count != allocator.num_held:
                raise RuntimeError(f"{allocator.num_held} {pool.value} pages are held but sequences list {count}")
