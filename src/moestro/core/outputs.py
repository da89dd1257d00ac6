"""What a user gets back, under vLLM's names."""

from dataclasses import dataclass

from moestro.core.kv_hints import NOTHING_USED, HintAnswer, PrefixUse
from moestro.core.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences. logprobs: one dict a token, the sampled token first."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where an ended request spent its time, in seconds over all its sequences.

    queue_s: from its arrival in the engine to its first step; looking up and loading its prefix
    (`prefix`: of its first sequence) are part of it or of prefill_s. prefill_s: from there to its
    first token; first_token_s: to that from the arrival. decode_s: from there to its last token.
    None where it ended before.
    """

    queue_s: float
    prefill_s: float | None = None
    decode_s: float | None = None
    first_token_s: float | None = None
    prefix: PrefixUse = NOTHING_USED
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request with everything it has produced so far.

    prompt_logprobs starts with None (the first token has no context). timing comes with the last
    output of a request that ran, kv_hints (what became of its hints) with that of one that had any.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    timing: RequestTiming | None = None
    kv_hints: HintAnswer | None = None
