"""What one forward pass attends over, as pages. Pure values, no torch.

A step has decode rows first, one token each, then prefill chunks. The sealed-page rule decides what a query at
position p reads: its own page (up to p) and the sink pages in 16 bit, every other page in sealed form.
"""

from dataclasses import dataclass

from kernels.format.layout import PageRef


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One token at `position`. `pages` are the sequence's pages up to its own; the own page is an open one."""

    position: int
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `start` to `start + length` of a sequence; `start` is a multiple of P.

    `context` are the pages before `start`. `targets` are where the chunk's own pages go: full ones to sealed pages,
    or to slots where they are sink pages; a partial last one to a slot.
    """

    start: int
    length: int
    context: tuple[PageRef, ...]
    targets: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What one forward pass attends over. Row order: `decode`, then the tokens of each chunk in turn."""

    decode: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]

    @property
    def num_rows(self) -> int:
        return len(self.decode) + sum(chunk.length for chunk in self.chunks)
