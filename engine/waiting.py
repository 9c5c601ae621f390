"""The queue of sequences that wait to be admitted, and which of them is next. No torch."""

import bisect
from typing import Protocol

from engine.sequence import Sequence

MAX_PASSED_OVER = 16
MAX_CANDIDATES = 32  # of equal priority, the first to arrive: looking each up in the tree takes some microseconds


class Pools(Protocol):
    def match(self, sequence: Sequence) -> object | None:
        """Bring `sequence.matched` up to date. Returns the sequence that is computing the next page, if one is."""

    def has_records(self, sequence: Sequence) -> bool:
        """Whether the host memory that it must be promised, if any, is there."""


class WaitingQueue:
    """Among the most urgent, the sequence next is the one of whose pages most are there, so that what is cached is used
    before it goes; but none is passed over more than `MAX_PASSED_OVER` times.

    Those that wait for another to compute their next page, or for host memory, which others give back only if they may
    go on, let others pass without a bound; once they can be admitted, they have been passed over.
    """

    def __init__(self, pools: Pools):
        self._pools = pools
        self._sequences: list[Sequence] = []

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return tuple(self._sequences)

    @property
    def num_sequences(self) -> int:
        return sum(sequence.num_seats for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=lambda other: other.urgency)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def next(self) -> Sequence | None:
        """Who should be admitted, with `matched` up to date; None if nobody can be now."""
        best: Sequence | None = None
        num_candidates = 0
        is_host_short = False
        for sequence in self._sequences:
            if best is not None and (
                num_candidates == MAX_CANDIDATES or sequence.request.priority > best.request.priority
            ):
                break
            if self._is_being_computed(sequence):
                continue
            if self._needs_records(sequence):
                is_host_short = is_host_short or not self._pools.has_records(sequence)
                if is_host_short:
                    continue
            num_candidates += 1
            if sequence.num_passed_over >= MAX_PASSED_OVER:  # they are in order of arrival
                return sequence
            if best is None or sequence.num_pages_there > best.num_pages_there:
                best = sequence
        return best

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether another sequence, as urgent or more so, is computing the very next page."""
        owner = self._pools.match(sequence)
        return isinstance(owner, Sequence) and owner.request.priority <= sequence.request.priority

    def _needs_records(self, sequence: Sequence) -> bool:
        shrink = sequence.request.shrink
        return shrink is not None and not shrink.is_positional and not sequence.swapped

    def take(self, sequence: Sequence) -> None:
        """Remove the one that `next` named, and count those that were passed over for it."""
        for other in self._sequences:
            if other.arrival < sequence.arrival and other.request.priority == sequence.request.priority:
                other.num_passed_over += 1
        self._sequences.remove(sequence)
