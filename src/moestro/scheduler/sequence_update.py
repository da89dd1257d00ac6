"""SequenceUpdate: what one step changed for one sequence."""

from typing import NamedTuple

from moestro.core.kv_hints import NOTHING_USED, HintAnswer, PrefixUse
from moestro.core.request import FinishReason
from moestro.core.step import TokenLogprobs


class SequenceUpdate(NamedTuple):
    """New tokens (after the stop rules), logprobs, and why it ended if it did.

    A named tuple because one is made for every sequence in every step, and a frozen dataclass of
    a dozen fields costs three times as much to make.

    prompt_logprobs: entries for the next prompt positions in order, the first one being position
    1 (position 0 has no context); only the sequence with index 0 of a request has them.
    num_cached_tokens: prompt tokens found in the prefix cache at its first admission; prefix says
    more of them. hint_answer: what became of its request's kv_hints, once it has ended.
    num_draft_tokens, num_accepted_tokens: verified in this step, and found right.
    """

    seq_id: int
    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    prefix: PrefixUse = NOTHING_USED
    hint_answer: HintAnswer | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
