"""Roster: every live sequence and where it is (waiting, held back, running)."""

from bisect import insort

from moestro.core.request import FinishReason, Request, Sequence, SequenceStatus
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler.lookahead import drop_drafts
from moestro.scheduler.policy import SortKey
from moestro.scheduler.queue import WaitingQueue


class Roster:
    """Moves sequences between the states of their life and keeps the lists in step.

    running is sorted by the policy's key. Siblings of one request may be held back until the
    first of them has its prompt computed, so that they find its pages in the prefix cache.
    Ids that the runner has state of and no longer needs are collected for the next Schedule.
    """

    def __init__(self, kv: KVCacheManager, sort_key: SortKey) -> None:
        self.queue = WaitingQueue(sort_key)
        self.running: list[Sequence] = []
        self.live: dict[int, Sequence] = {}
        self.num_preemptions = 0
        self._kv = kv
        self.key = sort_key
        self._requests: dict[str, list[Sequence]] = {}
        self._held: dict[int, list[Sequence]] = {}  # by seq_id of the sibling they wait for
        self._num_held = 0
        self._fetching: dict[int, Sequence] = {}  # waits for pages from lower tiers
        self._known_to_runner: set[int] = set()
        self._released: list[int] = []

    @property
    def num_waiting(self) -> int:
        return len(self.queue) + self._num_held + len(self._fetching)

    @property
    def num_fetching(self) -> int:
        """Sequences that wait beside the queue for their pages from lower tiers."""
        return len(self._fetching)

    @property
    def has_released(self) -> bool:
        """Whether take_released has something to give."""
        return bool(self._released)

    def of_request(self, request_id: str) -> list[Sequence]:
        """The live sequences of a request, in order of index."""
        return list(self._requests.get(request_id, ()))

    def add(
        self,
        request: Request,
        sequences: list[Sequence],
        hold_siblings: bool,
        fetches: bool = False,
    ) -> None:
        """Take in a request's new sequences; fetches: the first waits until let_in."""
        self.live.update((seq.seq_id, seq) for seq in sequences)
        self._requests[request.request_id] = list(sequences)
        if fetches:
            self._fetching[sequences[0].seq_id] = sequences[0]
        else:
            self.queue.push(sequences[0])
        siblings = sequences[1:]
        if hold_siblings and siblings:
            self._held[sequences[0].seq_id] = siblings
            self._num_held += len(siblings)
        else:
            for seq in siblings:
                self.queue.push(seq)

    def let_in(self, seq_id: int) -> None:
        """The pages of a sequence have come, or will not: it joins the queue."""
        seq = self._fetching.pop(seq_id, None)
        if seq is not None:
            self.queue.push(seq)

    def start(self, seq: Sequence) -> None:
        """The head of the queue, `seq`, has its pages: it runs."""
        self.queue.pop()
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=self.key)

    def preempt(self, seq: Sequence) -> None:
        """Release a running sequence's pages and let it wait with its tokens kept."""
        self._leave_running(seq)
        seq.status = SequenceStatus.PREEMPTED
        seq.num_preemptions += 1
        drop_drafts(seq)
        self.num_preemptions += 1
        self.queue.push(seq)

    def end(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Take a live sequence out of every list and release what it holds."""
        leader_id = seq.seq_id - seq.index
        if seq.status is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif seq.index and seq in self._held.get(leader_id, ()):
            self._held[leader_id].remove(seq)
            self._num_held -= 1
        else:
            if self._fetching.pop(seq.seq_id, None) is None:
                self.queue.discard(seq)
        self._kv.finish(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        seq.matcher = None
        del self.live[seq.seq_id]
        siblings = self._requests[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._requests[seq.request.request_id]
        self.let_siblings_in(seq)

    def let_siblings_in(self, first: Sequence) -> None:
        """The prompt of `first` is published, or never will be: its siblings join the queue."""
        siblings = self._held.pop(first.seq_id, None)
        if siblings is None:
            return
        self._num_held -= len(siblings)
        for seq in siblings:
            self.queue.push(seq)

    def take_released(self) -> tuple[int, ...]:
        """Ids whose state the runner drops before the next step."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def introduce(self, seq_id: int) -> None:
        """The runner gets state of this sequence with the next step."""
        self._known_to_runner.add(seq_id)

    def _leave_running(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._kv.release(seq)
        if seq.seq_id in self._known_to_runner:
            self._known_to_runner.remove(seq.seq_id)
            self._released.append(seq.seq_id)
