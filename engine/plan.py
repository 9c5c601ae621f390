"""What one step does, as values. No torch."""

from collections.abc import Collection
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from engine.kv.moves import Move
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk


@dataclass(frozen=True, slots=True)
class Fork:
    """A sibling that starts after the step, with a copy of its leader's open page in `slot` (None: that is full)."""

    sequence: Sequence
    slot: PageRef | None


@dataclass(frozen=True, slots=True)
class ScheduledDecode:
    """One token of a running sequence. `seal_to`: what takes the place of its page after the step, if the token fills
    it; `is_shared`: that page is sealed already."""

    sequence: Sequence
    row: DecodeRow
    seal_to: PageRef | None
    is_shared: bool
    forks: tuple[Fork, ...]

    @property
    def seal(self) -> tuple[int, int] | None:
        """The slot to seal after the step, and the sealed page that it goes to."""
        return (self.row.pages[-1].id, self.seal_to.id) if self.seal_to is not None and not self.is_shared else None


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A prefill chunk. `is_last`: no known token is left behind it, so its last row is sampled. `seal_to`: what its one
    full page, which goes to a slot of the sequence's window, is sealed into after the step."""

    sequence: Sequence
    chunk: PrefillChunk
    is_last: bool
    forks: tuple[Fork, ...]
    seal_to: PageRef | None

    @property
    def seal(self) -> tuple[int, int] | None:
        """The slot to seal after the step, and the sealed page that it goes to."""
        return None if self.seal_to is None else (self.chunk.targets[-1].id, self.seal_to.id)


@dataclass(slots=True)
class StepPlan:
    """`moves` are done before the step, in order. Row order: `decode`, then the tokens of `chunks`."""

    moves: list[Move] = field(default_factory=list)
    decode: list[ScheduledDecode] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.chunks

    @property
    def attention(self) -> AttentionStep:
        return AttentionStep(tuple(item.row for item in self.decode), tuple(item.chunk for item in self.chunks))

    @property
    def last_rows(self) -> list[ScheduledDecode | ScheduledChunk]:
        """Items whose last row is sampled, in row order: for the sequence, then for each of its forks."""
        return [*self.decode, *(item for item in self.chunks if item.is_last)]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token from this step."""
        return [s for item in self.last_rows for s in (item.sequence, *(fork.sequence for fork in item.forks))]

    @property
    def items(self) -> list[ScheduledDecode | ScheduledChunk]:
        """In row order."""
        return [*self.decode, *self.chunks]

    @property
    def seals(self) -> list[tuple[int, int]]:
        """(slot, sealed page) of what is sealed after the step."""
        return [item.seal for item in self.items if item.seal is not None]

    def seal_marks(self, marks: List[List[int]]) -> list[list[int]]:
        """For each of `seals` the places of marked tokens. `marks`: see `marked_places`."""
        items = zip(self.items, marks, strict=True)
        return [[*item.sequence.marks, *places] for item, places in items if item.seal is not None]

    def marked_places(self, rows: Collection[int], page_tokens: int) -> list[list[int]]:
        """For each of `items`, where in the last page of its tokens those of `rows` are."""
        places = [[item.row.position % page_tokens] * (row in rows) for row, item in enumerate(self.decode)]
        first = len(self.decode)
        for item in self.chunks:
            end = first + item.chunk.length
            page = end - 1 - (item.chunk.length - 1) % page_tokens
            places.append([row - page for row in range(page, end) if row in rows])
            first = end
        return places

    @property
    def num_sealed_pages(self) -> int:
        return len(self.seals) + sum(page.pool is Pool.SEALED for item in self.chunks for page in item.chunk.targets)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(slot, slot) of open pages that forks get a copy of after the step."""
        return [
            (item.sequence.pages[-1].id, fork.slot.id)
            for item in self.last_rows
            for fork in item.forks
            if fork.slot is not None
        ]

    def cancel(self, sequence: Sequence) -> list[PageRef]:
        """Take a sequence out of the plan. Returns the pages that the plan had taken for it, beside its own list."""
        items = [item for item in self.items if item.sequence is sequence]
        self.decode = [item for item in self.decode if item.sequence is not sequence]
        self.chunks = [item for item in self.chunks if item.sequence is not sequence]
        pages = [fork.slot for item in items for fork in item.forks if fork.slot is not None]
        return pages + [item.seal_to for item in items if isinstance(item, ScheduledDecode) and item.seal_to]
