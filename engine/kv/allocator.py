"""Which pages of one pool are free, held and promised. No torch."""

from kernels.format.layout import NULL_PAGE


class Allocator:
    """Pages 1 to `num_pages - 1` of a pool; page 0 is the null page and is never handed out.

    A page is free or held by `references` holders. `reserve` promises pages to a sequence before it needs them;
    `num_available` is what nobody was promised. Misuse is a bug and raises RuntimeError.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._references = [0] * num_pages
        self._num_reserved = 0

    @property
    def num_total(self) -> int:
        return len(self._references) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_free

    @property
    def num_available(self) -> int:
        return self.num_free - self._num_reserved

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
        """A page with one holder. The caller has checked `num_available`, or has just given back a reservation."""
        if self.num_available < 1:
            raise RuntimeError("no page is available")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def retain(self, page: int) -> None:
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be shared")
        self._references[page] += 1

    def release(self, page: int) -> None:
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is released more often than it was taken")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def check(self) -> None:
        """Raise RuntimeError unless every page is free or held, once, and promises are covered."""
        free = set(self._free)
        if len(free) != len(self._free) or NULL_PAGE in free:
            raise RuntimeError("the free list holds a page twice, or the null page")
        for page in range(1, len(self._references)):
            if (page in free) != (self._references[page] == 0):
                raise RuntimeError(f"page {page} is {'free and' if page in free else 'not free but not'} held")
        if not 0 <= self._num_reserved <= len(free):
            raise RuntimeError(f"{self._num_reserved} pages are promised but {len(free)} are free")
