"""Why a prompt did not find all of its pages."""

from dataclasses import replace
from itertools import islice

from moestro.core.kv_hints import MissReason, PrefixUse
from moestro.kvcache.identity import TOKEN_BYTES
from moestro.kvcache.prefix_index import PrefixIndex
from moestro.kvcache.run import Run

_MAX_COMPARED = 8
"""Continuations that are looked at for the first differing token."""


def explain_prefix(
    index: PrefixIndex,
    salt: str,
    packed: bytes,
    limit: int,
    *,
    stored_to: int = 0,
    across_tenants: bool = False,
) -> PrefixUse:
    """What the first `limit` pages of a prompt would find in each tier, and why no more.

    stored_to: behind which page what the store is known to have of it ends. across_tenants: say
    when another cache_salt has the prompt; for operators, as a tenant must not learn what others
    ask.
    """
    size = index.page_size
    tokens = {"device": 0, "host": 0}
    found, num_known, is_resident = 0, 0, True
    last, num_equal = None, 0
    for run, equal in index.match(salt, packed, limit):
        last, num_equal = run, equal
        num_known += equal
        is_resident = is_resident and bool(run.pages or run.slots)
        if is_resident:
            tokens["device" if run.pages else "host"] += equal * size
            found += equal
    end = max(found, min(stored_to, limit))
    use = PrefixUse(tokens["device"], tokens["host"], (end - found) * size)
    if end >= limit:
        return use
    if end < num_known:
        return replace(use, miss=MissReason.EVICTED)
    if end > num_known:  # only hashes are known there
        return replace(use, miss=MissReason.DIFFERS, first_difference=end * size)
    if last is None and across_tenants and _others_have(index, salt, packed):
        return PrefixUse(miss=MissReason.OTHER_NAMESPACE)
    miss, position = _why(index, salt, packed, (last, num_equal), end)
    return replace(use, miss=miss, first_difference=position)


def _why(
    index: PrefixIndex, salt: str, packed: bytes, end: tuple[Run | None, int], at: int
) -> tuple[MissReason, int | None]:
    """The reason, and the position of the first token that no cached prompt has there.

    end: the last run that matches and how many pages of it do; at: pages that match in all.
    """
    page_bytes = index.page_size * TOKEN_BYTES
    page = packed[at * page_bytes : (at + 1) * page_bytes]
    last, num_equal = end
    run = last if last is not None else index.find_root(salt)
    if run is not None and hash(page) in run.ghosts:
        return MissReason.EVICTED, None
    num_common = 0
    if run is not None and num_equal < run.num_pages:
        other = bytes(run.tokens[num_equal * page_bytes : (num_equal + 1) * page_bytes])
        num_common = _num_common(page, other)
    elif run is not None:
        newest = islice(reversed(run.children), _MAX_COMPARED)
        num_common = max((_num_common(page, other) for other in newest), default=0)
    if at or num_common:
        return MissReason.DIFFERS, at * index.page_size + num_common
    return MissReason.NO_PREFIX, None


def _others_have(index: PrefixIndex, salt: str, packed: bytes) -> bool:
    page = packed[: index.page_size * TOKEN_BYTES]
    return any(page in root.children for other, root in index.roots() if other != salt)


def _num_common(page: bytes, other: bytes) -> int:
    """Tokens that two pages begin with alike."""
    low, high = 0, min(len(page), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if page[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
