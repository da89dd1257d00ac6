"""What answers say of cached KV and of time: kv_hints, timing."""

from collections.abc import Sequence
from typing import Any

from moestro.core.kv_hints import HintAnswer, PrefixUse
from moestro.core.outputs import RequestOutput, RequestTiming


def answer_json(answer: HintAnswer) -> dict[str, Any]:
    """A hint's answer. accepted, requested and clipped in tokens; expires_at in Unix time."""
    return {
        "accepted": answer.accepted,
        "requested": answer.requested,
        "clipped": answer.clipped,
        "refused": answer.refused,
        "expires_at": answer.expires_at,
    }


def cached_json(prefix: PrefixUse) -> dict[str, int]:
    """Cached tokens by tier."""
    return {
        "device": prefix.device_tokens,
        "host": prefix.host_tokens,
        "store": prefix.store_tokens,
    }


def timing_json(timing: RequestTiming) -> dict[str, Any]:
    """The timing object, every key always there; null where a request ended before."""
    prefix = timing.prefix
    return {
        "queue_s": timing.queue_s,
        "lookup_s": prefix.lookup_s,
        "load_host_s": prefix.load_host_s,
        "load_store_s": prefix.load_store_s,
        "prefill_s": timing.prefill_s,
        "first_token_s": timing.first_token_s,
        "decode_s": timing.decode_s,
        "cached_tokens": cached_json(prefix),
        "miss_reason": prefix.miss,
        "first_difference": prefix.first_difference,
        "num_draft_tokens": timing.num_draft_tokens,
        "num_accepted_tokens": timing.num_accepted_tokens,
    }


def end_of_answer(
    outputs: Sequence[RequestOutput | None], *, timing: bool, kv_hints: bool
) -> dict[str, Any]:
    """The keys `timing` and `kv_hints` of an answer, as far as they are wanted and known.

    An object for one prompt; for several a list in their order.
    """
    told: dict[str, Any] = {}
    known = [output for output in outputs if output is not None]
    if timing:
        told["timing"] = [o.timing and timing_json(o.timing) for o in known]
    if kv_hints:
        told["kv_hints"] = [o.kv_hints and answer_json(o.kv_hints) for o in known]
    if len(outputs) == 1:
        told = {name: values[0] for name, values in told.items() if values and values[0]}
    return told
