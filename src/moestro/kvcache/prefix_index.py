"""PrefixIndex: from page hash to the page that holds it, and which idle page goes first."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixIndex:
    """hash -> page for published pages, with an LRU order over those nobody holds.

    One page per hash and one hash per page. Idle pages are evicted least recently parked first;
    the caller parks the pages of a sequence last page first, so a prefix outlives what follows it.
    """

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._page_of)

    @property
    def num_idle(self) -> int:
        """Published pages that nobody holds."""
        return len(self._idle)

    def match(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Pages of the longest published prefix of `hashes`, at most `limit` of them."""
        pages: list[int] = []
        page_of = self._page_of
        for i in range(min(limit, len(hashes))):
            page = page_of.get(hashes[i])
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, page_hash: bytes, page: int) -> bool:
        """Publish a held page; False (and no change) if another page has that hash already."""
        if page_hash in self._page_of:
            return False
        if page in self._hash_of:
            raise ValueError(f"page {page} is published under another hash")
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def holds(self, page: int) -> bool:
        """Whether `page` is published."""
        return page in self._hash_of

    def is_idle(self, page: int) -> bool:
        """Whether `page` is published and parked."""
        return page in self._idle

    def park(self, page: int) -> None:
        """Nobody holds the published `page` any more: it may be evicted, as the newest."""
        if page not in self._hash_of or page in self._idle:
            raise ValueError(f"page {page} is not published or already idle")
        self._idle[page] = None

    def unpark(self, page: int) -> None:
        """The idle `page` is held again."""
        del self._idle[page]

    def evict(self) -> int:
        """Forget the idle page parked longest ago and return it."""
        page, _ = self._idle.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def idle_pages(self) -> Iterator[int]:
        """Idle pages, next to be evicted first."""
        return iter(self._idle)

    def check(self) -> None:
        """Raise AssertionError if the two maps or the LRU disagree. Costs O(pages)."""
        assert len(self._page_of) == len(self._hash_of), "maps differ in size"
        for page_hash, page in self._page_of.items():
            assert self._hash_of[page] == page_hash, f"page {page} has another hash"
        for page in self._idle:
            assert page in self._hash_of, f"idle page {page} is not published"
