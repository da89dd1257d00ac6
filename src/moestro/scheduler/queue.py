"""WaitingQueue: sequences that wait for admission, best first."""

import heapq

from moestro.core.request import Sequence
from moestro.scheduler.policy import SortKey


class WaitingQueue:
    """A heap by `sort_key`. Preempted sequences come back to where their key puts them."""

    def __init__(self, sort_key: SortKey) -> None:
        self._sort_key = sort_key
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, seq: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        self._waiting.add(seq.seq_id)
        heapq.heappush(self._heap, (self._sort_key(seq), seq))

    def peek(self) -> Sequence | None:
        """The sequence to admit next, or None."""
        heap = self._heap
        while heap and heap[0][1].seq_id not in self._waiting:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        """Remove and return what peek shows; IndexError when empty."""
        seq = self.peek()
        if seq is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        self._waiting.remove(seq.seq_id)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Take a finished sequence out, wherever it is; its heap entry goes when it surfaces."""
        self._waiting.discard(seq.seq_id)
