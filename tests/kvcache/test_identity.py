"""Page names: stable for ever, different whenever anything differs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.kvcache.identity import HASH_BYTES, pack_tokens, page_hashes, root_hash

ids = st.lists(st.integers(0, 2**32 - 1), max_size=30)


def names(token_ids: list[int], page_size: int = 4, root: bytes = b"\x00" * 16) -> list[bytes]:
    return page_hashes(root, pack_tokens(token_ids), page_size)


def test_names_are_a_format_that_does_not_change() -> None:
    root = root_hash(b"namespace", "salt")
    assert root.hex() == "c5c7d1372246c9eab6807fc6a8b674c8"
    token_ids = [1, 2, 3, 2**32 - 1, 5, 6, 7, 8]
    assert [name.hex() for name in names(token_ids, root=root)] == [
        "7217c086d437b6e750194de7417b35d8",
        "5a9b8d7bb0853e22ae26ee6b36ef13b2",
    ]


def test_only_full_pages_have_names() -> None:
    assert [len(names(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(name) == HASH_BYTES for name in names(list(range(9))))


@given(ids, st.integers(1, 5), st.data())
def test_extending_step_by_step_gives_the_same_names(
    token_ids: list[int], page_size: int, data: st.DataObject
) -> None:
    root = root_hash(b"", "")
    hashes: list[bytes] = []
    for end in [*sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))), None]:
        rest = token_ids[len(hashes) * page_size : end]
        hashes += page_hashes(hashes[-1] if hashes else root, pack_tokens(rest), page_size)
    assert hashes == names(token_ids, page_size, root)


@given(ids, ids)
def test_names_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    pages_a, pages_b = names(a), names(b)
    for i, (one, other) in enumerate(zip(pages_a, pages_b, strict=False)):
        assert (one == other) == (a[: 4 * i + 4] == b[: 4 * i + 4])


def test_a_later_page_depends_on_every_token_before_it() -> None:
    assert names([9, 2, 3, 4, 5, 6, 7, 8])[1] != names([1, 2, 3, 4, 5, 6, 7, 8])[1]


def test_namespace_and_salt_separate() -> None:
    roots = {
        root_hash(namespace, salt)
        for namespace in (b"", b"a", b"ab")
        for salt in ("", "a", "b", "ab", "\ud800", "\x00")
    }
    assert len(roots) == 18


def test_namespace_and_salt_do_not_run_into_each_other() -> None:
    assert root_hash(b"ab", "c") != root_hash(b"a", "bc")


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_ids_beyond_32_bits_are_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        names([1, 2, 3, token_id])
