"""Sequences for tests of the page accounting."""

import itertools

from moestro.core.kv_hints import PrefixUse
from moestro.core.request import Request, Sequence
from moestro.core.sampling_params import SamplingParams
from moestro.kvcache import KVCacheManager

_ids = itertools.count()


def make_sequence(token_ids: list[int], cache_salt: str = "") -> Sequence:
    """A fresh sequence with this prompt; every call gives another seq_id."""
    seq_id = next(_ids)
    request = Request(
        request_id=str(seq_id),
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(),
        seed=0,
        max_tokens=16,
        cache_salt=cache_salt,
    )
    return Sequence(seq_id, request, 0, list(token_ids))


def explain(kv: KVCacheManager, token_ids: list[int], cache_salt: str = "") -> PrefixUse:
    """The answer of a cache that need not ask a store, or whose store is quick."""
    told: list[PrefixUse] = []
    kv.explain(token_ids, cache_salt, told.append)
    while not told:
        kv.wait(1.0)
        kv.poll()
    (answer,) = told
    return answer
