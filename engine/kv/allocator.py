"""Which pages of one pool are free, held, cached and promised. No torch."""

from kernels.format.layout import NULL_PAGE


class Allocator:
    """Pages 1 to `num_pages - 1` of a pool; page 0 is the null page and is never handed out.

    A page is free, held by `references` sequences, or cached: held by none, but kept by the prefix tree, which can give
    it up. `reserve` promises pages to a sequence before it needs them; `num_available` is what nobody was promised.
    Misuse is a bug and raises RuntimeError.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._references = [0] * num_pages
        self._is_kept = [False] * num_pages
        self._num_reserved = 0
        self._num_cached = 0

    @property
    def num_total(self) -> int:
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_held(self) -> int:
        return self.num_total - len(self._free) - self._num_cached

    @property
    def num_reserved(self) -> int:
        return self._num_reserved

    @property
    def num_available(self) -> int:
        return len(self._free) + self._num_cached - self._num_reserved

    def can_reserve(self, count: int) -> bool:
        return count <= self.num_available

    def reserve(self, count: int) -> None:
        if not self.can_reserve(count):
            raise RuntimeError(f"cannot reserve {count} pages of {self.num_available} available")
        self._num_reserved += count

    def unreserve(self, count: int) -> None:
        if count > self._num_reserved:
            raise RuntimeError(f"cannot give back {count} of {self._num_reserved} reserved pages")
        self._num_reserved -= count

    def allocate(self) -> int:
        """A page with one holder. The caller has seen to it that one is available, and that one is free."""
        if self.num_available < 1 or not self._free:
            raise RuntimeError("no page is available" if self._free else "no page is free")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def references(self, page: int) -> int:
        return self._references[page]

    def pages(self) -> tuple[list[int], list[bool]]:
        """Of each page from 1 on: how many hold it, and whether the prefix tree keeps it. Copies."""
        return self._references[1:], self._is_kept[1:]

    def retain(self, page: int) -> None:
        """One holder more. Taking a cached page makes it unavailable, which the caller has checked."""
        if self._references[page] < 1:
            if not self._is_kept[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            if self.num_available < 1:
                raise RuntimeError(f"page {page} is promised and cannot be taken")
            self._num_cached -= 1
        self._references[page] += 1

    def release(self, page: int) -> bool:
        """One holder less. Returns whether nobody holds the page any more: it is cached if it is kept, else free."""
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is released more often than it was taken")
        self._references[page] -= 1
        if self._references[page]:
            return False
        if self._is_kept[page]:
            self._num_cached += 1
        else:
            self._free.append(page)
        return True

    def keep(self, page: int) -> None:
        """The prefix tree takes a held page."""
        if self._references[page] < 1 or self._is_kept[page]:
            raise RuntimeError(f"page {page} is not held, or kept already")
        self._is_kept[page] = True

    def forget(self, page: int) -> bool:
        """The prefix tree gives a page up. Returns whether it is free now: nobody holds it."""
        if not self._is_kept[page]:
            raise RuntimeError(f"page {page} is not kept")
        self._is_kept[page] = False
        if self._references[page]:
            return False
        self._num_cached -= 1
        self._free.append(page)
        return True

    def check(self) -> None:
        """Raise RuntimeError unless every page is free, held or cached, once, and promises are covered."""
        free = set(self._free)
        if len(free) != len(self._free) or NULL_PAGE in free:
            raise RuntimeError("the free list holds a page twice, or the null page")
        num_cached = 0
        for page in range(1, len(self._references)):
            is_used = self._references[page] > 0 or self._is_kept[page]
            num_cached += self._is_kept[page] and self._references[page] == 0
            if (page in free) == is_used:
                raise RuntimeError(f"page {page} is {'free and' if page in free else 'not free but not'} in use")
        if num_cached != self._num_cached:
            raise RuntimeError(f"{num_cached} pages are cached but {self._num_cached} were counted")
        if not 0 <= self._num_reserved <= len(free) + num_cached:
            raise RuntimeError(f"{self._num_reserved} pages are promised but {len(free) + num_cached} can be had")
