"""check_accounts: whether every page and host slot has exactly one owner."""

from collections import Counter

from moestro.core.request import Sequence
from moestro.kvcache.device_tier import DeviceTier
from moestro.kvcache.lower_tiers import LowerTiers
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run


def check_accounts(
    index: PrefixIndex,
    device: DeviceTier,
    below: LowerTiers,
    tails: dict[int, Run],
    holders: list[Sequence],
) -> None:
    """Raise AssertionError unless each page and slot is free, a run's, a move's or a holder's.

    holders: all sequences that hold pages. Costs O(pages).
    """
    index.check()
    users: Counter[Run] = Counter()
    held: Counter[Run] = Counter()
    private: list[int] = []
    holding = [seq for seq in holders if seq.pages]
    for seq in holding:
        private += seq.pages[seq.num_published_pages :]
        private += _check_path(seq, tails[seq.seq_id], users, held)
    runs = list(index.runs())
    device.allocator.check([page for run in runs for page in run.pages] + private)
    for run in runs:
        assert run.num_users == users[run], f"{run}: used by {users[run]} sequences"
        assert run.num_holders == held[run], f"{run}: held by {held[run]} sequences"
        for claim in run.claims:
            assert claim.runs.count(run) == 1, f"{run}: a claim that does not know it"
    assert len(tails) == len(holding), "a tail without a sequence"
    arrived = [
        slot
        for wait in below.fetcher.claimed()
        for slots, _ in wait.arrived.values()
        for slot in slots
    ]
    slots = [slot for run in runs for slot in run.slots]
    below.host.allocator.check(slots + arrived + below.transfers.slots_in_flight())


def _check_path(seq: Sequence, tail: Run, users: "Counter[Run]", held: "Counter[Run]") -> list[int]:
    """Count the runs of `seq`; its own copies of what others published."""
    copies: list[int] = []
    run, end = tail, seq.num_published_pages
    while run.parent is not None:
        users[run] += 1
        mine = seq.pages[end - run.num_pages : end]
        if run.pages and run.pages[0] == mine[0]:
            assert run.pages == mine, f"{run} is held in part"
            held[run] += 1
        else:
            copies += mine
        run, end = run.parent, end - run.num_pages
    assert end == 0, f"the runs of sequence {seq.seq_id} don't cover what it published"
    return copies
