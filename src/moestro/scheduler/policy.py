"""The scheduler's decisions as pure functions."""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, islice

from moestro.core.request import Sequence
from moestro.errors import ConfigError

SortKey = Callable[[Sequence], tuple[int, int]]


def sort_key_of(policy: str) -> SortKey:
    """The total order of sequences under a policy: who is admitted first, and last to be preempted.

    Times of the clock take no part, so the same submissions give the same schedules. Under
    `priority` an endless stream of urgent requests holds the others up: that is what it says.
    Raises ConfigError for an unknown policy.
    """
    if policy == "fcfs":
        return lambda seq: (0, seq.seq_id)
    if policy == "priority":
        return lambda seq: (seq.request.priority, seq.seq_id)
    raise ConfigError(f"scheduling_policy must be fcfs or priority, got {policy!r}.")


def turn_order(
    rows: Seq[Sequence], after: tuple[int, int] | None, key: SortKey
) -> Iterator[Sequence]:
    """`rows` (sorted by key) in a circle that starts behind the key `after`."""
    start = 0 if after is None else bisect_right(rows, after, key=key)
    return chain(islice(rows, start, None), islice(rows, start))


def chunk_size(num_remaining: int, tokens_left: int) -> int:
    """How many of a prompt's remaining tokens this step computes."""
    return min(num_remaining, tokens_left)


def choose_victim(
    running: Seq[Sequence], needy: Sequence, planned: Container[int]
) -> Sequence | None:
    """Whom to preempt so that `needy` gets a page; None if it has to wait instead.

    The last of `running` (sorted by key), but nobody before `needy` and nobody whose work in this
    step is already planned. Preempting only later ones is what rules out that two sequences
    preempt each other for ever: the first one is never a victim.
    """
    for seq in reversed(running):
        if seq is needy:
            return None
        if seq.seq_id not in planned:
            return seq
    return None


def admission_headroom(num_running: int, num_pages: int) -> int:
    """Pages to leave available when admitting, so that running sequences can grow for a while.

    Without it a sequence admitted into the last pages would be preempted a few steps later. At
    most 1/32 of the pool, so that small pools are used to the last page; 0 when nothing runs.
    """
    return min(num_running, num_pages // 32)
