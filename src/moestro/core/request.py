"""Request (what was asked, frozen) and Sequence (one token stream and its state)."""

import enum
from dataclasses import dataclass, field

from moestro.core.grammar import GrammarMatcher
from moestro.core.kv_hints import NOTHING_USED, HintAnswer, KVHints, PrefixUse
from moestro.core.sampling_params import SamplingParams


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SequenceStatus(enum.Enum):
    """Where a sequence is in its life; PREEMPTED waits like WAITING, with its tokens kept."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for. Lower `priority` values run first (scheduling_policy priority).

    `stop_token_ids` are the ids that end every sequence: the checkpoint's eos ids (unless
    ignore_eos) merged with the request's own. `seed` is final: derived when the user gave none.
    `max_tokens` is final: capped by the context limit.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    prompt: str | None = None
    priority: int = 0
    cache_salt: str = ""
    kv_hints: KVHints | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One token stream of a request. Owned by the scheduler; its KVCacheManager keeps the page
    fields, nobody else changes anything.

    token_ids = prompt + output. num_computed_tokens: how many of them have their KV in pages
    (or will, once the step in flight is done). pages: page ids in order, page i holds positions
    [i * page_size, (i + 1) * page_size). packed_tokens: its token ids as prefixes are compared,
    as far as they were known when it was added or admitted. num_published_pages: how many of
    `pages` others may already share. num_prompt_logprobs: how many prompt positions have their
    logprobs delivered. prefix: what its first admission found in the cache. hint_answer: what
    became of its request's kv_hints, once it has ended; None without hints.

    num_runs_in_flight: steps that are planned and not updated yet compute so many runs of it.
    num_pending_tokens: what those add to token_ids if all their drafts are accepted;
    num_computed_tokens counts them too, until update takes off what was rejected.
    num_next_drafts: how many drafts its last run asks for. draft_token_ids: those that its last
    output proposed, while they are known.
    """

    seq_id: int
    request: Request
    index: int
    token_ids: list[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    packed_tokens: bytes = b""
    num_published_pages: int = 0
    num_prompt_logprobs: int = 0
    num_preemptions: int = 0
    num_runs_in_flight: int = 0
    num_pending_tokens: int = 0
    num_next_drafts: int = 0
    draft_token_ids: tuple[int, ...] = ()
    prefix: PrefixUse = NOTHING_USED
    hint_answer: HintAnswer | None = None
    matcher: GrammarMatcher | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)
