"""The pages of a step's sequences as arrays: those in slots before the sealed ones, whatever their order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.format.layout import PageRef, Pool

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Listed:
    """Pages of one sequence: `ids`, and `numbers`, which of its pages they are. The first `num_slots` are in slots."""

    ids: Ints
    numbers: Ints
    num_slots: int

    @classmethod
    def of(cls, refs: tuple[PageRef, ...]) -> "Listed":
        ids = np.fromiter((ref.id for ref in refs), np.int32, len(refs))
        is_open = np.fromiter((ref.pool is Pool.OPEN for ref in refs), np.bool_, len(refs))
        numbers = np.concatenate([is_open.nonzero()[0], (~is_open).nonzero()[0]]).astype(np.int32)
        return cls(ids[numbers], numbers, int(is_open.sum()))


@dataclass(frozen=True, slots=True)
class Place:
    """Where pages of one sequence lie in `PageLists`: slots from `first_slot` on, sealed pages from `first_page` on."""

    listed: Listed
    first_slot: int
    num_slots: int
    num_pages: int

    @property
    def first_page(self) -> int:
        return self.first_slot + self.listed.num_slots

    @property
    def columns(self) -> tuple[int, int, int, int]:
        return self.first_slot, self.num_slots, self.first_page, self.num_pages

    @property
    def numbers(self) -> Ints:
        """Of the slots, then of the sealed pages."""
        slots, pages = np.split(self.listed.numbers, [self.listed.num_slots])
        return np.concatenate([slots[: self.num_slots], pages[: self.num_pages]])

    def before(self, number: int) -> "Place":
        """Those before page `number` of the sequence."""
        slots, pages = np.split(self.listed.numbers, [self.listed.num_slots])
        counts = (int(np.searchsorted(numbers, number)) for numbers in (slots, pages))
        return Place(self.listed, self.first_slot, *counts)


class RowListings:
    """Remembers the listings of decode rows from one step to the next, since a row's pages seldom change."""

    def __init__(self) -> None:
        self._last: dict[PageRef, tuple[tuple[PageRef, ...], Listed]] = {}
        self._now: dict[PageRef, tuple[tuple[PageRef, ...], Listed]] = {}

    def of(self, refs: tuple[PageRef, ...]) -> Listed:
        """Of a row that owns the last of these pages alone."""
        known = self._last.get(refs[-1])
        if known is None or known[0] != refs:
            known = refs, Listed.of(refs)
        self._now[refs[-1]] = known
        return known[1]

    def end_step(self) -> None:
        """Forget the rows that were not asked for since the last call."""
        self._last, self._now = self._now, {}


class PageLists:
    """The pages of a step's rows and chunks one after another."""

    def __init__(self) -> None:
        self._listed: list[Listed] = []
        self.num_pages = 0

    def add(self, listed: Listed) -> Place:
        place = Place(listed, self.num_pages, listed.num_slots, len(listed.ids) - listed.num_slots)
        self._listed.append(listed)
        self.num_pages += len(listed.ids)
        return place

    @property
    def ids(self) -> Ints:
        return self._joined([listed.ids for listed in self._listed])

    @property
    def numbers(self) -> Ints:
        return self._joined([listed.numbers for listed in self._listed])

    @staticmethod
    def _joined(parts: list[Ints]) -> Ints:
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)
