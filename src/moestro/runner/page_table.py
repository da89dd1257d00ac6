"""PageTable: the page ids of every sequence the runner knows, one row each."""

import numpy as np

from moestro.core.plan import page_table_width


class PageTable:
    """Rows of page ids, padded with 0. pages: [max_num_seqs, M] int32.

    M: see page_table_width. version rises with every change.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages = np.zeros((max_num_seqs, page_table_width(max_model_len, page_size)), np.int32)
        self.version = 0
        self._counts = [0] * max_num_seqs
        self._free = list(range(max_num_seqs - 1, -1, -1))

    def take_row(self) -> int:
        """A free row. Raises ValueError when there is none."""
        if not self._free:
            raise ValueError(
                f"the schedule holds more than max_num_seqs={len(self._counts)} sequences at once; "
                "release one first."
            )
        return self._free.pop()

    def give_row(self, row: int) -> None:
        """Empty a row and make it free."""
        self.version += 1
        self.pages[row, : self._counts[row]] = 0
        self._counts[row] = 0
        self._free.append(row)

    def append(self, row: int, new_pages: tuple[int, ...]) -> None:
        """Add pages at the end of a row. Raises ValueError beyond its width."""
        begin = self._counts[row]
        end = begin + len(new_pages)
        if end > self.pages.shape[1]:
            raise ValueError(
                f"a sequence was given {end} pages; max_model_len allows {self.pages.shape[1]}."
            )
        self.version += 1
        self.pages[row, begin:end] = new_pages
        self._counts[row] = end

    def pages_of(self, row: int) -> np.ndarray:
        """[P] int32, the pages of a row."""
        return self.pages[row, : self._counts[row]]

    def capacity(self, row: int) -> int:
        """Tokens the row's pages hold."""
        return self._counts[row] * self.page_size
