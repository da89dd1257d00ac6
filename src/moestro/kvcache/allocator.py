"""PageAllocator: which pages (or host slots) are free."""

from collections.abc import Iterable, Sequence


class PageAllocator:
    """A free list over ids [0, num_pages); everything else is somebody's.

    Freed pages are reused last in, first out: the order is deterministic and memory that was
    never needed stays untouched. Costs a slice, whatever the number of pages.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages off the free list. The caller checks num_free first."""
        if num_pages > len(self._free):
            raise ValueError(f"{num_pages} pages wanted, {len(self._free)} are free")
        if num_pages == 0:
            return []
        pages = self._free[: -num_pages - 1 : -1]
        del self._free[-num_pages:]
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Put pages back; the first of them is the next to be taken."""
        if len(self._free) + len(pages) > self.num_pages:
            raise ValueError(f"{len(pages)} pages freed, but only {self.num_taken} are taken")
        self._free += pages[::-1]

    @property
    def num_taken(self) -> int:
        return self.num_pages - len(self._free)

    def check(self, taken: Iterable[int]) -> None:
        """Raise AssertionError unless each page is either free or once in `taken`."""
        owners = [0] * self.num_pages
        for page in self._free:
            owners[page] += 1
        for page in taken:
            assert owners[page] == 0, f"page {page} has two owners"
            owners[page] = 1
        for page, count in enumerate(owners):
            assert count == 1, f"page {page} is {'lost' if count == 0 else 'free twice'}"
