"""Deleting pages from the store through the mover."""

from tests.fakes.page_store import MemoryStore
from tests.runner.test_transfer import KEYS, LONG_S, Rig, rig, store

from moestro.core.page_moves import MoveKind

__all__ = ["rig", "store"]  # fixtures


def test_deletes_what_is_there_and_tells_of_the_store_at_once(rig: Rig, store: MemoryStore) -> None:
    assert rig.mover.state().store_bytes == 0
    rig.do(MoveKind.PUT, slots=(0, 1, 2), keys=KEYS[:3])
    assert rig.mover.state().store_bytes == 3 * rig.host.page_bytes
    assert rig.do(MoveKind.DELETE, keys=(KEYS[0], KEYS[7], KEYS[2])).num_done == 3
    assert list(store.pages) == [KEYS[1]]
    assert rig.mover.state().store_bytes == rig.host.page_bytes


def test_closing_finishes_deletions(rig: Rig, store: MemoryStore) -> None:
    rig.do(MoveKind.PUT, slots=(0, 1), keys=KEYS[:2])
    rig.submit(MoveKind.DELETE, keys=KEYS[:2])
    rig.mover.close(LONG_S)
    assert store.pages == {}
