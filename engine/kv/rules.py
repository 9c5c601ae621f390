"""How many pages, slots and host records a sequence needs: arithmetic over its tokens and its shrink hook. No torch."""

from collections.abc import Sequence as List
from dataclasses import dataclass

from engine.kv.shrink import ShrinkView
from engine.kv.sizing import num_sequence_pages, num_sequence_slots
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRules:
    """`shrink_sinks`: first pages that no shrink hook drops (`sink_pages`, but where all pages are 16-bit that is 0).
    `window_pages`: pages before a token's own that it reads in slots. `num_pages`: sealed pages there are.
    `max_chunk_pages`: pages of the longest prefill in one step. `slot_records`: host records that hold a slot."""

    page_tokens: int
    sink_pages: int
    shrink_sinks: int
    num_pages: int
    max_chunk_pages: int
    slot_records: int = 1
    window_pages: int = 0

    def num_shared(self, sequence: Sequence) -> int:
        """Most leading full pages of the known tokens that may be shared with other sequences. None with a window:
        behind a page from the tree, the slots of its window would be missing."""
        if self.window_pages:
            return 0
        full = len(sequence.tokens) // self.page_tokens
        shrink = sequence.request.shrink
        whole = shrink.num_whole_pages(self.shrink_sinks) if shrink else None
        return full if whole is None else min(full, whole)

    def shares_next(self, sequence: Sequence) -> bool:
        """Whether the page behind the shared ones may be shared too."""
        node = sequence.node
        return sequence.can_share and node is not None and node.depth + 1 < self.num_shared(sequence)

    def view(self, sequence: Sequence, mass: List[float], is_first: bool) -> ShrinkView:
        """What the shrink hook of a sequence with this mass sees."""
        return ShrinkView(mass, self.shrink_sinks, self.page_tokens, sequence.is_prefilled, is_first)

    def num_matched(self, sequence: Sequence) -> int:
        """Most leading full pages that may come from the tree. Not the page of the last known token, whose logits must
        be computed, and none with tokens whose attention its shrink hook observes."""
        shrink = sequence.request.shrink
        computed = max(1, shrink.window if shrink else 0)
        return min(max(0, len(sequence.tokens) - computed) // self.page_tokens, self.num_shared(sequence))

    def num_sealed(self, sequence: Sequence) -> int:
        """Sealed pages for all known tokens, the page of the last one as if it were full."""
        return self._bounded(sequence, num_sequence_pages(len(sequence.tokens), self.page_tokens, self.sink_pages))

    def most_sealed(self, sequence: Sequence) -> int:
        """Sealed pages that it takes at most in its life."""
        longest = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
        return self._bounded(sequence, num_sequence_pages(longest, self.page_tokens, self.sink_pages))

    def _bounded(self, sequence: Sequence, needed: int) -> int:
        kept = self._num_kept(sequence)
        return needed if kept is None else min(needed, kept + self.chunk_pages(sequence) + 1)

    def _num_kept(self, sequence: Sequence) -> int | None:
        """Sealed pages that it keeps at most, while its prompt is computed, too; None: no bound."""
        shrink = sequence.request.shrink
        kept = shrink.num_kept_pages(self.shrink_sinks) if shrink and shrink.is_positional else None
        return None if kept is None else kept - self.sink_pages

    def chunk_pages(self, sequence: Sequence) -> int:
        """Most pages of its prompt to compute in one step: a sequence that drops pages needs no more than the pool has,
        however long it is."""
        if self.window_pages:  # so that all pages that the step writes can be read in slots
            return min(self.max_chunk_pages, self.window_pages + 1)
        kept = self._num_kept(sequence)
        return self.max_chunk_pages if kept is None else max(1, min(self.max_chunk_pages, self.num_pages - kept - 1))

    def num_slots(self, sequence: Sequence) -> int:
        """Slots that it and its siblings hold at most."""
        return num_sequence_slots(self.sink_pages, self.window_pages) * sequence.num_seats

    def most_records(self, sequence: Sequence) -> int:
        """Host records that it takes at most when it is swapped out, without its siblings; 0 where it never is."""
        shrink = sequence.request.shrink
        if shrink is None or shrink.is_positional:
            return 0
        longest = sequence.num_prompt_tokens + sequence.request.sampling.max_tokens
        full = -(-longest // self.page_tokens)
        kept = shrink.num_kept_pages(self.shrink_sinks)
        full = full if kept is None else min(full, kept + 1)
        slots = min(full, self.sink_pages) + 1
        return slots * self.slot_records + max(0, full - self.sink_pages)

    def needs(self, start: int, length: int) -> tuple[int, int]:
        """(slots, sealed pages) that computing `length` tokens behind the first `start` takes."""
        end, size = start + length, self.page_tokens
        filled = max(0, end // size - max(start // size, self.sink_pages))
        if start % size:  # the open page is there; it is sealed into a page when it fills
            return 0, filled
        num_pages = -(-end // size) - start // size
        return num_pages if self.window_pages else num_pages - filled, filled
