"""What AsyncEngine and Engine say to each other: frozen, picklable, standard types only.

They travel over a Channel: a thread queue inside one process, a pipe between two.
"""

from dataclasses import dataclass, field
from typing import Protocol

from moestro.core.kv_hints import HintAnswer, HintRequest, PrefixUse
from moestro.core.kv_stats import KVTierStats
from moestro.core.outputs import Logprob, RequestTiming
from moestro.core.request import FinishReason, Request
from moestro.core.step import ExpertTokens


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Start a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop a request, at whatever stage it is; unknown ids are ignored."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Stop the loop. drain: finish what was accepted first."""

    drain: bool = True


@dataclass(frozen=True, slots=True)
class ExplainPrefix:
    """Ask what a prompt would find in the cache now."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class KVCommand:
    """A hint or a question about cached KV; a KVAnswer with its id follows."""

    command_id: int
    command: HintRequest | ExplainPrefix


@dataclass(frozen=True, slots=True)
class KVAnswer:
    """The answer to a KVCommand. error: why there is none."""

    command_id: int
    answer: HintAnswer | PrefixUse | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one step added to one sequence of a request. text never splits a character.

    timing: of the whole request, with the last delta of one that ran; the only part that depends
    on a clock, and no part of equality. hint_answer: what became of the request's kv_hints.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[dict[int, Logprob], ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    timing: RequestTiming | None = field(default=None, compare=False)
    hint_answer: HintAnswer | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters of the loop at one moment; counters only grow.

    kv: of the KV tiers; depends on when moves finish and is no part of equality.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_preemptions: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    last_step_tokens: int = 0
    kv: KVTierStats | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything one step has to tell, in a deterministic order.

    times: of the requests that ended by themselves in it; no part of equality, as they depend on a
    clock. expert_tokens: see core.step.StepOutput.
    """

    deltas: tuple[SequenceDelta, ...] = ()
    stats: EngineStats = field(default_factory=EngineStats)
    times: tuple[RequestTiming, ...] = field(default=(), compare=False)
    expert_tokens: ExpertTokens | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The loop died; nothing follows."""

    message: str


class Channel(Protocol):
    """One end of a two-way message line. Messages arrive whole and in order.

    receive returns None on timeout and raises EOFError once the other end has closed and all
    messages have been taken. timeout_s None waits for ever, 0 polls.
    """

    def send(self, message: object) -> None: ...

    def receive(self, timeout_s: float | None = None) -> object | None: ...

    def close(self) -> None: ...
