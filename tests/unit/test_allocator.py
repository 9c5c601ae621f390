"""The allocator against a model of plain dictionaries, and its refusals."""

import random
from collections import Counter

import pytest

from engine.kv.allocator import Allocator
from kernels.format.layout import NULL_PAGE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_pages", [2, 3, 9])
def test_random_rounds_agree_with_plain_counts(seed: int, num_pages: int) -> None:
    rng = random.Random(seed)
    allocator = Allocator(num_pages)
    holders: Counter[int] = Counter()
    promised = 0
    seen = set()
    for _ in range(3000):
        free = num_pages - 1 - len(holders)
        match rng.choice(["allocate", "allocate", "release", "release", "retain", "reserve", "unreserve"]):
            case "allocate" if free > promised:
                page = allocator.allocate()
                assert page not in holders
                holders[page] = 1
                seen.add(page)
            case "allocate":
                with pytest.raises(RuntimeError, match="no page is available"):
                    allocator.allocate()
            case "release" if holders:
                page = rng.choice(list(holders))
                allocator.release(page)
                holders[page] -= 1
                holders += Counter()  # drops what nobody holds any more
            case "retain" if holders:
                page = rng.choice(list(holders))
                allocator.retain(page)
                holders[page] += 1
            case "reserve":
                count = rng.randrange(num_pages)
                assert allocator.can_reserve(count) == (count <= free - promised)
                if count <= free - promised:
                    allocator.reserve(count)
                    promised += count
                else:
                    with pytest.raises(RuntimeError, match="cannot reserve"):
                        allocator.reserve(count)
            case "unreserve" if promised:
                count = rng.randint(1, promised)
                allocator.unreserve(count)
                promised -= count
        allocator.check()
        assert allocator.num_total == num_pages - 1
        assert allocator.num_held == len(holders)
        assert allocator.num_free == num_pages - 1 - len(holders)
        assert allocator.num_available == num_pages - 1 - len(holders) - promised
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


@pytest.mark.parametrize("break_it", ["twice free", "free and held", "lost", "null page free", "over-promised"])
def test_check_finds_broken_books(break_it: str) -> None:
    allocator = Allocator(5)
    page = allocator.allocate()
    allocator.check()
    match break_it:
        case "twice free":
            allocator._free.append(allocator._free[0])
        case "free and held":
            allocator._free.append(page)
        case "lost":
            allocator._free.pop()
        case "null page free":
            allocator._free.append(NULL_PAGE)
        case "over-promised":
            allocator._num_reserved = 4
    with pytest.raises(RuntimeError):
        allocator.check()
