"""What a request has produced so far: deltas go in, a RequestOutput comes out."""

from dataclasses import dataclass, field

from moestro.core.kv_hints import HintAnswer
from moestro.core.messages import SequenceDelta
from moestro.core.outputs import CompletionOutput, Logprob, RequestOutput, RequestTiming
from moestro.core.request import FinishReason, Request


@dataclass(slots=True)
class _SequenceProgress:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class RequestProgress:
    """Adds up the deltas of one request. `error` is the first one that a sequence ended with."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.error: str | None = None
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._sequences = [_SequenceProgress() for _ in range(request.params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []
        self._num_cached_tokens = 0
        self._timing: RequestTiming | None = None
        self._hint_answer: HintAnswer | None = None
        self._num_open = request.params.n

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(s.token_ids) for s in self._sequences)

    def add(self, delta: SequenceDelta) -> None:
        """Take what a step added; deltas of a sequence come in order."""
        sequence = self._sequences[delta.index]
        sequence.token_ids += delta.token_ids
        sequence.text += delta.text
        sequence.logprobs += delta.logprobs
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False):
            sequence.cumulative_logprob += entry[token_id].logprob
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.index == 0:
            self._num_cached_tokens = max(self._num_cached_tokens, delta.num_cached_tokens)
            self._hint_answer = delta.hint_answer or self._hint_answer
        self._timing = delta.timing or self._timing
        if delta.finish_reason is not None and sequence.finish_reason is None:
            sequence.finish_reason = delta.finish_reason
            sequence.stop_reason = delta.stop_reason
            self._num_open -= 1
            if delta.error is not None:
                self.error = self.error or delta.error
                sequence.stop_reason = delta.error

    def output(self) -> RequestOutput:
        """Everything so far. Its lists are this object's own and grow with later deltas: a copy
        at every token would cost the square of the output's length.

        A sequence that ended in an error has the error's text as its stop_reason.
        """
        request, params = self.request, self.request.params
        scored = params.logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[
                CompletionOutput(
                    index=index,
                    text=sequence.text,
                    token_ids=sequence.token_ids,
                    cumulative_logprob=sequence.cumulative_logprob if scored else None,
                    logprobs=sequence.logprobs if scored else None,
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                )
                for index, sequence in enumerate(self._sequences)
            ],
            finished=self.finished,
            prompt_logprobs=None if params.prompt_logprobs is None else self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            timing=self._timing,
            kv_hints=self._hint_answer,
        )
