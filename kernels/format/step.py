"""What one forward pass attends over, as pages. Pure values, no torch.

A step has decode rows first, one token each, then prefill chunks. The sealed-page rule decides what a query at
position p reads: its own page (up to p), the sink pages and the W pages before its own in 16 bit, every other page in
sealed form. A page that is read in 16 bit is named by its slot.
"""

from dataclasses import dataclass

from kernels.format.layout import PageRef


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token at `position`. `pages` are the sequence's pages up to its own, which is an open one: sink pages first,
    dropped pages left out. `is_observed`: how it shares its attention out to the pages is asked for."""

    position: int
    pages: tuple[PageRef, ...]
    is_observed: bool = False


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `start` to `start + length` of a sequence; `start` is a multiple of P.

    `context` are the pages before `start`: sink pages first, dropped pages left out. They may be targets of earlier
    chunks of the same step, since a step writes all pages of a layer before it attends. `targets` are where the
    chunk's own pages go: full ones to sealed pages, or to slots where they are sink pages or will be read as a
    window (they are sealed after the step); a partial last one to a slot. The last `num_observed` (at most `length`)
    tokens are observed, as in `DecodeRow`.
    """

    start: int
    length: int
    context: tuple[PageRef, ...]
    targets: tuple[PageRef, ...]
    num_observed: int = 0


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What one forward pass attends over. Row order: `decode`, then the tokens of each chunk in turn."""

    decode: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def num_rows(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.chunks)

    @property
    def can_be_replayed(self) -> bool:
        """Decode rows alone, none of them observed: what a step in one launch does (engine/runner.py, `Replay`)."""
        return bool(self.decode) and not self.chunks and not any(row.is_observed for row in self.decode)

    @property
    def positions(self) -> list[int]:
        """Of each row, in its text."""
        rows = [row.position for row in self.decode]
        return rows + [chunk.start + index for chunk in self.chunks for index in range(chunk.length)]

    def cache_positions(self, page_tokens: int) -> list[int]:
        """Of each row, counted over the pages that its sequence has left (StreamingLLM, arXiv 2309.17453, section 3.2):
        smaller than the position in the text by the tokens that were dropped."""
        rows = [(len(row.pages) - 1) * page_tokens + row.position % page_tokens for row in self.decode]
        chunks = ((len(chunk.context) * page_tokens, chunk.length) for chunk in self.chunks)
        return rows + [first + index for first, length in chunks for index in range(length)]
