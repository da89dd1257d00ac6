"""PageAllocator: which pages are free and how many sequences hold each of the others."""


class PageAllocator:
    """A free list with reference counts over page ids [0, num_pages).

    A page is free (in the list, count 0), held (count > 0), or idle (count 0 but not in the list:
    the prefix index keeps it for a later hit). Freed pages are reused last in, first out: the
    order is deterministic and memory that was never needed stays untouched.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01") * num_pages
        self._counts = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, page: int) -> int:
        """How many sequences hold `page`."""
        return self._counts[page]

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages off the free list, each with count 1. The caller checks num_free first."""
        if num_pages > len(self._free):
            raise ValueError(f"{num_pages} pages wanted, {len(self._free)} are free")
        if num_pages == 0:
            return []
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[-num_pages:]
        for page in pages:
            self._is_free[page] = 0
            self._counts[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """One more holder of a held or idle page."""
        if self._is_free[page]:
            raise ValueError(f"page {page} is free and can't be shared")
        self._counts[page] += 1

    def drop(self, page: int) -> int:
        """One holder less; returns how many are left. At 0 the page is idle until freed."""
        if self._counts[page] < 1:
            raise ValueError(f"page {page} has no holder to drop")
        self._counts[page] -= 1
        return self._counts[page]

    def free(self, page: int) -> None:
        """Put an idle page back on the free list."""
        if self._is_free[page] or self._counts[page]:
            raise ValueError(f"page {page} is free or held and can't be freed")
        self._is_free[page] = 1
        self._free.append(page)

    def check(self) -> None:
        """Raise AssertionError if free list, flags and counts disagree. Costs O(pages)."""
        assert len(set(self._free)) == len(self._free), "a page is twice on the free list"
        assert sum(self._is_free) == len(self._free), "free flags and free list disagree"
        for page in self._free:
            assert self._is_free[page], f"page {page} is on the free list but not flagged"
            assert self._counts[page] == 0, f"page {page} is free and held"
        assert min(self._counts, default=0) >= 0, "a negative count"
