"""The allocator against a model of plain dictionaries, and its refusals."""

import random
from collections import Counter

import pytest

from engine.kv.allocator import Allocator
from kernels.format.layout import NULL_PAGE


class Books:
    """What an allocator should know, as plain counts: holders of each page, kept pages, promises."""

    def __init__(self, num_pages: int):
        self.total = num_pages - 1
        self.holders: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.promised = 0

    @property
    def held(self) -> list[int]:
        return [page for page, count in self.holders.items() if count]

    @property
    def cached(self) -> list[int]:
        return [page for page in self.kept if not self.holders[page]]

    @property
    def free(self) -> int:
        return self.total - len(self.held) - len(self.cached)

    @property
    def available(self) -> int:
        return self.free + len(self.cached) - self.promised


ACTIONS = ["allocate", "allocate", "release", "release", "retain", "reserve", "unreserve", "keep", "forget"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_pages", [2, 3, 9])
def test_random_rounds_agree_with_plain_counts(seed: int, num_pages: int) -> None:
    rng = random.Random(seed)
    allocator, books = Allocator(num_pages), Books(num_pages)
    seen = set()
    for _ in range(3000):
        page = rng.randrange(num_pages)
        match rng.choice(ACTIONS):
            case "allocate" if books.available < 1 or not books.free:
                with pytest.raises(RuntimeError, match="no page is (available|free)"):
                    allocator.allocate()
            case "allocate":
                page = allocator.allocate()
                assert not books.holders[page] and page not in books.kept
                books.holders[page] = 1
                seen.add(page)
            case "release" if books.holders[page]:
                books.holders[page] -= 1
                assert allocator.release(page) == (books.holders[page] == 0)
            case "retain" if books.holders[page] or (page in books.kept and books.available > 0):
                allocator.retain(page)
                books.holders[page] += 1
            case "retain":
                with pytest.raises(RuntimeError, match=f"page {page} is (free|promised) and cannot"):
                    allocator.retain(page)
            case "keep" if books.holders[page] and page not in books.kept:
                allocator.keep(page)
                books.kept.add(page)
            case "keep":
                with pytest.raises(RuntimeError, match=f"page {page} is not held, or kept already"):
                    allocator.keep(page)
            case "forget" if page in books.kept:
                books.kept.remove(page)
                assert allocator.forget(page) == (books.holders[page] == 0)
            case "reserve":
                count = rng.randrange(num_pages)
                assert allocator.can_reserve(count) == (count <= books.available)
                if count <= books.available:
                    allocator.reserve(count)
                    books.promised += count
                else:
                    with pytest.raises(RuntimeError, match="cannot reserve"):
                        allocator.reserve(count)
            case "unreserve" if books.promised:
                count = rng.randint(1, books.promised)
                allocator.unreserve(count)
                books.promised -= count
        allocator.check()
        assert allocator.num_total == books.total
        assert [allocator.references(page) for page in range(num_pages)] == [
            books.holders[page] for page in range(num_pages)
        ]
        assert allocator.num_held == len(books.held) and allocator.num_cached == len(books.cached)
        assert (allocator.num_free, allocator.num_reserved) == (books.free, books.promised)
        assert allocator.num_available == books.available
    assert seen == set(range(1, num_pages))  # every page but the null page


def test_a_page_cannot_be_released_twice() -> None:
    allocator = Allocator(4)
    page = allocator.allocate()
    allocator.retain(page)
    allocator.release(page)
    assert allocator.num_held == 1
    allocator.release(page)
    with pytest.raises(RuntimeError, match=f"page {page} is released more often"):
        allocator.release(page)
    with pytest.raises(RuntimeError, match=f"page {page} is free and cannot be shared"):
        allocator.retain(page)


def test_the_null_page_can_be_neither_shared_nor_released() -> None:
    allocator = Allocator(4)
    with pytest.raises(RuntimeError):
        allocator.release(NULL_PAGE)
    with pytest.raises(RuntimeError):
        allocator.retain(NULL_PAGE)
    assert NULL_PAGE not in {allocator.allocate() for _ in range(3)}


def test_a_promised_page_is_only_for_whom_it_was_promised_to() -> None:
    allocator = Allocator(4)
    allocator.reserve(2)
    allocator.allocate()
    assert not allocator.can_reserve(1)
    with pytest.raises(RuntimeError, match="no page is available"):
        allocator.allocate()
    allocator.unreserve(1)
    allocator.allocate()
    with pytest.raises(RuntimeError, match="cannot give back 2 of 1"):
        allocator.unreserve(2)


def test_a_kept_page_outlives_its_holders_and_comes_back() -> None:
    allocator = Allocator(2)
    page = allocator.allocate()
    allocator.keep(page)
    assert allocator.release(page) and (allocator.num_free, allocator.num_cached) == (0, 1)
    with pytest.raises(RuntimeError, match="no page is free"):  # it must be given up first
        allocator.allocate()
    allocator.retain(page)
    assert (allocator.num_held, allocator.num_cached) == (1, 0)
    allocator.release(page)
    assert allocator.forget(page)
    with pytest.raises(RuntimeError, match=f"page {page} is not kept"):
        allocator.forget(page)
    assert allocator.allocate() == page


def test_a_cached_page_that_is_promised_cannot_be_taken() -> None:
    allocator = Allocator(2)
    page = allocator.allocate()
    allocator.keep(page)
    allocator.release(page)
    allocator.reserve(1)
    with pytest.raises(RuntimeError, match=f"page {page} is promised and cannot be taken"):
        allocator.retain(page)


BROKEN = ["twice free", "free and held", "free and kept", "lost", "null page free", "over-promised", "miscounted"]


@pytest.mark.parametrize("break_it", BROKEN)
def test_check_finds_broken_books(break_it: str) -> None:
    allocator = Allocator(5)
    page = allocator.allocate()
    allocator.check()
    match break_it:
        case "twice free":
            allocator._free.append(allocator._free[0])
        case "free and held":
            allocator._free.append(page)
        case "free and kept":
            allocator._is_kept[allocator._free[0]] = True
        case "miscounted":
            allocator._num_cached = 1
        case "lost":
            allocator._free.pop()
        case "null page free":
            allocator._free.append(NULL_PAGE)
        case "over-promised":
            allocator._num_reserved = 4
    with pytest.raises(RuntimeError):
        allocator.check()
