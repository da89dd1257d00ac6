"""PrefixIndex: the longest prefix, runs divided and joined, names, nothing kept without need."""

from hypothesis import given
from hypothesis import strategies as st

from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run

SIZE = 2
A = [1, 1, 2, 2, 3, 3, 4, 4]


def put(index: PrefixIndex, tokens: list[int], first_page: int = 0, salt: str = "") -> Run:
    """One run of all these tokens below the root, idle on the device."""
    run = index.add(index.root(salt), pack_tokens(tokens))
    run.pages = list(range(first_page, first_page + run.num_pages))
    index.device.add(run)
    return run


def found(index: PrefixIndex, tokens: list[int], limit: int = 99, salt: str = "") -> list[int]:
    path = index.match(salt, pack_tokens(tokens), min(limit, len(tokens) // SIZE))
    return [page for run, num_equal in path for page in run.pages[:num_equal]]


def test_match_stops_where_the_tokens_differ_and_at_the_limit() -> None:
    index = PrefixIndex(SIZE)
    put(index, A, 10)
    assert found(index, A) == [10, 11, 12, 13]
    assert found(index, [*A, 5, 5]) == [10, 11, 12, 13]
    assert found(index, [*A[:5], 9, 4, 4]) == [10, 11]
    assert found(index, A[:3]) == [10]
    assert found(index, [9, *A[1:]]) == []
    assert found(index, A, limit=3) == [10, 11, 12]
    assert found(index, A, limit=0) == []
    assert found(index, A, salt="other") == []


def test_a_divided_run_is_found_as_before_and_keeps_its_object_below() -> None:
    index = PrefixIndex(SIZE)
    run = put(index, A)
    run.num_hits, run.stored = 3, True
    names = list(index.name_pages(run))
    upper = index.split(run, 1)
    assert found(index, A) == [0, 1, 2, 3]
    assert (upper.pages, run.pages) == ([0], [1, 2, 3])
    assert (upper.hashes, run.hashes) == (names[:1], names[1:])
    assert run.parent is upper
    assert (upper.num_hits, upper.stored) == (3, True)
    assert index.device.num_pages == 4
    index.check()


def test_branches_hang_below_what_they_share() -> None:
    index = PrefixIndex(SIZE)
    upper = index.split(put(index, A), 2)
    branch = index.add(upper, pack_tokens([7, 7, 8, 8]))
    branch.pages = [20, 21]
    index.device.add(branch)
    assert found(index, [*A[:4], 7, 7, 8, 8]) == [0, 1, 20, 21]
    assert found(index, A) == [0, 1, 2, 3]
    index.check()


def test_runs_that_share_one_fate_are_joined() -> None:
    index = PrefixIndex(SIZE)
    run = put(index, A)
    upper = index.split(run, 2)
    index.join(upper)
    assert upper.pages == [0, 1, 2, 3]
    assert found(index, A) == [0, 1, 2, 3]
    assert list(index.runs()) == [upper]
    assert index.device.num_pages == 4
    index.check()


def test_runs_that_differ_in_anything_stay_apart() -> None:
    index = PrefixIndex(SIZE)
    lower = put(index, A)
    upper = index.split(lower, 2)
    lower.stored = True
    index.join(upper)
    lower.stored = False
    upper.num_users = 1
    index.join(upper)
    upper.num_users = 0
    index.device.pin(upper)
    index.join(upper)
    index.device.unpin(upper)
    branch = index.add(upper, pack_tokens([7, 7]))
    index.join(upper)
    assert len(list(index.runs())) == 3
    index.prune(branch)
    index.join(upper)
    assert list(index.runs()) == [upper]


def test_lengthen_and_truncate_are_each_others_opposite() -> None:
    index = PrefixIndex(SIZE)
    run = put(index, A[:4])
    index.name_pages(run)
    index.lengthen(run, pack_tokens(A[4:]))
    run.pages += [2, 3]
    index.check()
    assert run.hashes == page_hashes(root_hash(b"", ""), pack_tokens(A), SIZE)
    index.truncate(run, 2)
    index.check()
    assert (run.pages, found(index, A)) == ([0, 1], [0, 1])
    assert run.hashes == page_hashes(root_hash(b"", ""), pack_tokens(A[:4]), SIZE)


def test_what_is_nowhere_is_forgotten_with_its_parents_and_its_root() -> None:
    index = PrefixIndex(SIZE)
    lower = put(index, A)
    upper = index.split(lower, 2)
    for run in (upper, lower):
        index.device.discard(run)
        run.pages = []
        index.prune(run)
    assert list(index.runs()) == []
    assert list(index.roots()) == []
    index.prune(lower)  # once more does nothing


def test_forgetting_a_run_that_was_joined_takes_nothing_else() -> None:
    index = PrefixIndex(SIZE)
    lower = put(index, [1, 1, 1, 1, 2, 2])
    upper = index.split(lower, 1)
    below = index.split(lower, 1)  # the run of the second page, which is equal to the first
    index.join(upper)
    index.prune(below)
    index.prune(lower)
    assert found(index, [1, 1, 1, 1, 2, 2]) == [0, 1, 2]
    index.check()


def test_what_is_in_use_or_moving_is_not_forgotten() -> None:
    index = PrefixIndex(SIZE)
    run = put(index, A)
    index.device.discard(run)
    run.pages, run.num_users = [], 1
    index.prune(run)
    run.num_users = 0
    run.claims.append(object())
    index.prune(run)
    assert list(index.runs()) == [run]


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=16), max_size=8), st.data())
def test_names_are_those_of_the_whole_prefix(prompts: list[list[int]], data: st.DataObject) -> None:
    """However the tree grew, and whichever run is named first."""
    index = PrefixIndex(1, b"space")
    for prompt in prompts:
        packed, parent, done = pack_tokens(prompt), index.root("x"), 0
        for run, num_equal in index.match("x", packed, len(prompt)):
            parent = run if num_equal == run.num_pages else index.split(run, num_equal)
            done += num_equal
        if done < len(prompt):
            run = index.add(parent, packed[4 * done :])
            run.slots = [0] * run.num_pages
            index.host.add(run)
        named = data.draw(st.sampled_from(list(index.runs())))
        index.name_pages(named)
    index.check()
    for prompt in prompts:
        names = [
            name
            for run, num_equal in index.match("x", pack_tokens(prompt), len(prompt))
            for name in index.name_pages(run)[:num_equal]
        ]
        assert names == page_hashes(root_hash(b"space", "x"), pack_tokens(prompt), 1)
