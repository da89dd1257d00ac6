"""What the engine remembers of a request in flight."""

from dataclasses import dataclass, field, replace

from moestro.core.kv_hints import NOTHING_USED, PrefixUse
from moestro.core.outputs import RequestTiming
from moestro.core.request import Request
from moestro.engine.detokenizer import Detokenizer


@dataclass(slots=True)
class SequenceState:
    """The engine's share of one sequence's state; tokens and pages are the scheduler's."""

    detokenizer: Detokenizer | None
    num_output_tokens: int = 0


@dataclass(slots=True)
class RequestState:
    """A request in flight; sequences leave as they finish. Times in seconds of the clock."""

    request: Request
    first_seq_id: int
    arrived_s: float
    sequences: dict[int, SequenceState] = field(default_factory=dict)
    told_first_prompt_logprob: bool = False
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefix: PrefixUse = NOTHING_USED
    load_host_s: float = 0.0

    def timing(self) -> RequestTiming | None:
        """None for a request that never ran."""
        if self.started_s is None:
            return None
        queue_s = self.started_s - self.arrived_s
        prefix = self.prefix
        if prefix.host_tokens or prefix.store_tokens:
            # the step's loads together: they share the memory's bandwidth
            prefix = replace(prefix, load_host_s=self.load_host_s)
        if self.first_token_s is None or self.last_token_s is None:
            return RequestTiming(queue_s, prefix=prefix)
        return RequestTiming(
            queue_s,
            prefill_s=self.first_token_s - self.started_s,
            decode_s=self.last_token_s - self.first_token_s,
            first_token_s=self.first_token_s - self.arrived_s,
            prefix=prefix,
        )
