"""The pages that a step writes and those that it reads, while it is planned. No torch."""

from collections.abc import Sequence as List

from engine.kv.cache import PageCache
from engine.kv.rules import PageRules
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool
from kernels.format.step import PrefillChunk


class StepPages:
    """Takes pages from a `PageCache` as `PageRules` say."""

    def __init__(self, cache: PageCache, rules: PageRules):
        self.cache = cache
        self.rules = rules
        self.page_tokens = rules.page_tokens

    def can_extend(self, sequence: Sequence, length: int) -> bool:
        """Whether the next `length` tokens find pages."""
        if length == 1 and 0 < sequence.num_computed_tokens % self.page_tokens < self.page_tokens - 1:
            return True  # most decode rows: neither the first nor the last of a page
        slots, pages = self.rules.needs(sequence.num_computed_tokens, length)
        unpromised = pages - min(pages, sequence.num_reserved_pages)
        return self.cache.open.can_reserve(slots) and self.cache.sealed.can_reserve(unpromised)

    def extend_decode(self, sequence: Sequence) -> tuple[PageRef | None, bool]:
        """Take what the next token needs. Returns the sealed page that takes the place of its page after the step, if
        the token fills it, and whether that page is in the tree already, so that nothing is to be sealed."""
        position = sequence.num_computed_tokens
        if position % self.page_tokens == 0:
            sequence.pages.append(self.cache.allocate(Pool.OPEN))
        index = position // self.page_tokens
        if (position + 1) % self.page_tokens or index < self.rules.sink_pages:
            return None, False
        if self.rules.shares_next(sequence):
            assert sequence.node is not None
            there = sequence.node.children.get(self.cache.tree.page_at(sequence.tokens, index))
            if there is not None and there.page is not None:
                self._use_promise(sequence)
                self.cache.hold(there)
                return there.page, True
        return self._take_sealed(sequence), False

    def row_pages(self, sequence: Sequence) -> tuple[PageRef, ...]:
        """What the next token reads, its own page included. Call after `extend_decode`."""
        if not sequence.window:
            return tuple(sequence.pages)
        return (*_with_window(sequence.pages[:-1], sequence.window), sequence.pages[-1])

    def extend_prefill(self, sequence: Sequence, length: int) -> list[tuple[PrefillChunk, PageRef | None]]:
        """Take the pages that the next `length` tokens go to, and say what is read on the way. With each chunk comes
        the page that it is sealed into after the step, where there is a window.

        With a window, and where a shrink hook depends on positions alone, what is read changes from page to page, so
        each is a chunk.
        """
        if self.rules.window_pages:
            return self._extend_window(sequence, length)
        start, end, size = sequence.num_computed_tokens, sequence.num_computed_tokens + length, self.page_tokens
        before = list(sequence.pages)
        targets = []
        for page in range(start // size, -(-end // size)):
            if page >= self.rules.sink_pages and (page + 1) * size <= end:
                targets.append(self._take_sealed(sequence))
            else:
                targets.append(self.cache.allocate(Pool.OPEN))
        sequence.pages.extend(targets)
        shrink = sequence.request.shrink
        if shrink is None or not shrink.is_positional:
            window = shrink.window if shrink else 0
            num_observed = max(0, end - max(start, len(sequence.tokens) - window))
            return [(PrefillChunk(start, length, tuple(before), tuple(targets), num_observed), None)]
        chunks: list[tuple[PrefillChunk, PageRef | None]] = []
        for target in targets:
            for place in reversed(shrink.drop(self.rules.view(sequence, [0.0] * len(before), False))):
                del before[place]
            chunks.append((PrefillChunk(start, min(size, end - start), tuple(before), (target,)), None))
            before.append(target)
            start += size
        return chunks

    def _extend_window(self, sequence: Sequence, length: int) -> list[tuple[PrefillChunk, PageRef | None]]:
        size, start = self.page_tokens, sequence.num_computed_tokens
        end = start + length
        chunks: list[tuple[PrefillChunk, PageRef | None]] = []
        for first in range(start, end, size):
            context = _with_window(sequence.pages, sequence.window[-self.rules.window_pages :])
            slot = self.cache.allocate(Pool.OPEN)
            chunk = PrefillChunk(first, min(size, end - first), context, (slot,))
            if first + size > end or first // size < self.rules.sink_pages:
                sequence.pages.append(slot)
                chunks.append((chunk, None))
                continue
            page = self._take_sealed(sequence)
            sequence.pages.append(page)
            sequence.window.append(slot)
            chunks.append((chunk, page))
        return chunks

    def _take_sealed(self, sequence: Sequence) -> PageRef:
        self._use_promise(sequence)
        return self.cache.allocate(Pool.SEALED)

    def _use_promise(self, sequence: Sequence) -> None:
        if sequence.num_reserved_pages:
            sequence.num_reserved_pages -= 1
            self.cache.sealed.unreserve(1)


def _with_window(full: List[PageRef], window: List[PageRef]) -> tuple[PageRef, ...]:
    """Full pages as a token behind them reads them: the newest in the slots of `window`."""
    return (*full[: len(full) - len(window)], *window)
