"""Engine: the loop of one rank, without tensors and without threads.

schedule -> runner.execute -> scheduler.update -> text and stop strings -> StepReport.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from moestro.core.messages import EngineStats, RequestTimes, SequenceDelta, StepReport
from moestro.core.outputs import Logprob
from moestro.core.request import FinishReason, Request
from moestro.core.step import Runner, Schedule, TokenLogprobs
from moestro.engine.detokenizer import Detokenizer, TokenVocabulary
from moestro.errors import RequestError, shown
from moestro.scheduler import Scheduler, SequenceUpdate

logger = logging.getLogger(__name__)


class TextVocabulary(TokenVocabulary, Protocol):
    """What the engine needs of a tokenizer."""

    def token_to_piece(self, token_id: int) -> str: ...


@dataclass(slots=True)
class _SequenceState:
    """The engine's share of one sequence's state; tokens and pages are the scheduler's."""

    detokenizer: Detokenizer | None
    num_output_tokens: int = 0


@dataclass(slots=True)
class _RequestState:
    """A request in flight; sequences leave as they finish. Times in seconds of the clock."""

    request: Request
    first_seq_id: int
    arrived_s: float
    sequences: dict[int, _SequenceState] = field(default_factory=dict)
    told_first_prompt_logprob: bool = False
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def times(self) -> RequestTimes | None:
        """None for a request that never ran."""
        if self.started_s is None:
            return None
        prefill_s = decode_s = None
        if self.first_token_s is not None and self.last_token_s is not None:
            prefill_s = self.first_token_s - self.started_s
            decode_s = self.last_token_s - self.first_token_s
        return RequestTimes(self.started_s - self.arrived_s, prefill_s, decode_s)


class Engine:
    """Runs requests to their end. Not thread-safe: one thread calls everything.

    What goes wrong with one request ends that request (finish_reason error); an exception out of
    step() means that the engine is broken. vocabulary None: token ids only, no text. clock:
    seconds, for the times of requests only; nothing is decided by it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        vocabulary: TextVocabulary | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._vocabulary = vocabulary
        self._clock = clock
        self._requests: dict[str, _RequestState] = {}
        self._waiting: dict[int, _RequestState] = {}  # by first_seq_id, until its first step
        self._pending: list[SequenceDelta] = []
        self._times: list[RequestTimes] = []

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises RequestError when its id is in use or its grammar is refused."""
        if request.request_id in self._requests:
            raise RequestError(
                f"The request id {shown(request.request_id)} is in use: ids must be unique.",
                "request_id",
            )
        first, *_ = self._scheduler.add(request)
        params = request.params
        vocabulary = self._vocabulary if params.detokenize else None
        state = _RequestState(
            request,
            first.seq_id,
            self._clock(),
            {
                index: _SequenceState(
                    None if vocabulary is None else Detokenizer(vocabulary, params)
                )
                for index in range(params.n)
            },
        )
        self._requests[request.request_id] = self._waiting[first.seq_id] = state

    def refuse(self, request: Request, why: str) -> None:
        """Tell in the next StepReport that `request` ends without having begun."""
        self._pending += [
            SequenceDelta(request.request_id, index, finish_reason=FinishReason.ERROR, error=why)
            for index in range(request.params.n)
        ]

    def abort(self, request_id: str) -> None:
        """End a request at whatever stage it is; unknown and finished ids are ignored.

        The next StepReport tells it, with the text that was held back.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        self._waiting.pop(state.first_seq_id, None)
        self._scheduler.abort(request_id)
        for index, sequence in state.sequences.items():
            text = sequence.detokenizer.feed((), last=True).text if sequence.detokenizer else ""
            self._pending.append(
                SequenceDelta(request_id, index, text=text, finish_reason=FinishReason.ABORT)
            )

    def abort_all(self) -> None:
        """End every request."""
        for request_id in tuple(self._requests):
            self.abort(request_id)

    def discard_pending(self) -> None:
        """Forget what the next report would tell of aborted and refused requests."""
        self._pending.clear()

    def has_work(self) -> bool:
        """Whether step() has anything to do or to tell."""
        return bool(self._pending) or self._scheduler.has_work()

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        return self._scheduler.stats()

    def step(self) -> StepReport:
        """Compute one step and report it; deltas in the order of the schedule, aborts first."""
        deltas, self._pending = self._pending, []
        schedule = self._scheduler.schedule()
        expert_tokens = None
        if schedule is not None:
            self._note_starts(schedule)
            output = self._runner.execute(schedule)
            expert_tokens = output.expert_tokens
            updates = self._scheduler.update(schedule, output)
            now_s = self._clock()
            if not (schedule.sequences or schedule.released or updates):
                raise RuntimeError(f"step {schedule.step_id} has requests but schedules nothing")
            deltas += (d for u in updates if (d := self._digest(u, now_s)) is not None)
        times, self._times = self._times, []
        return StepReport(tuple(deltas), self.stats(), tuple(times), expert_tokens)

    def close(self) -> None:
        """Drop all requests and release the runner's memory."""
        self.abort_all()
        self.discard_pending()
        self._runner.close()

    def _note_starts(self, schedule: Schedule) -> None:
        for new in schedule.new_sequences:
            state = self._waiting.pop(new.seq_id, None)
            if state is not None:
                state.started_s = self._clock()

    def _digest(self, update: SequenceUpdate, now_s: float) -> SequenceDelta | None:
        """One sequence's update as text; None when it has nothing to tell."""
        state = self._requests.get(update.request_id)
        sequence = state.sequences.get(update.index) if state else None
        if state is None or sequence is None:
            return None
        token_ids, reason, stop_reason = (
            update.new_token_ids,
            update.finish_reason,
            update.stop_reason,
        )
        text = ""
        if sequence.detokenizer is not None:
            piece = sequence.detokenizer.feed(
                token_ids,
                last=reason is not None,
                ended_by_token=_ends_with_stop_token(state.request, update),
            )
            text, token_ids = piece.text, token_ids[: piece.num_tokens]
            if piece.stop is not None:
                if reason is None:
                    self._scheduler.finish(
                        update.seq_id,
                        FinishReason.STOP,
                        piece.stop,
                        sequence.num_output_tokens + len(token_ids),
                    )
                reason, stop_reason = FinishReason.STOP, piece.stop
        sequence.num_output_tokens += len(token_ids)
        if token_ids:
            state.last_token_s = now_s
            if state.first_token_s is None:
                state.first_token_s = now_s
        prompt_logprobs = self._prompt_logprobs(state, update)
        if reason is not None:
            self._forget(state, update.index)
        if not (token_ids or prompt_logprobs or reason):
            return None
        return SequenceDelta(
            update.request_id,
            update.index,
            token_ids,
            text,
            tuple(self._as_dict(e) for e in update.logprobs[: len(token_ids)]),
            prompt_logprobs,
            update.num_cached_tokens,
            reason,
            stop_reason,
            update.error,
        )

    def _forget(self, state: _RequestState, index: int) -> None:
        """A sequence has ended; with the last one its request has."""
        del state.sequences[index]
        if state.sequences:
            return
        del self._requests[state.request.request_id]
        self._waiting.pop(state.first_seq_id, None)
        times = state.times()
        if times is not None:
            self._times.append(times)

    def _prompt_logprobs(
        self, state: _RequestState, update: SequenceUpdate
    ) -> tuple[dict[int, Logprob] | None, ...]:
        """Entries that this step adds; the first token of a prompt has none."""
        if state.request.params.prompt_logprobs is None or update.index != 0:
            return ()
        entries = [self._as_dict(e) for e in update.prompt_logprobs]
        if state.told_first_prompt_logprob:
            return tuple(entries)
        state.told_first_prompt_logprob = True
        return (None, *entries)

    def _as_dict(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token itself first, then the most likely ones."""
        vocabulary = self._vocabulary
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in zip(
            entry.token_ids, entry.logprobs, entry.ranks, strict=True
        ):
            if token_id not in found:
                text = vocabulary.token_to_piece(token_id) if vocabulary else None
                found[token_id] = Logprob(logprob, rank, text)
        return found


def _ends_with_stop_token(request: Request, update: SequenceUpdate) -> bool:
    """Whether the last new token is what ended the sequence (a grammar may end one too)."""
    if update.finish_reason is not FinishReason.STOP or not update.new_token_ids:
        return False
    return update.new_token_ids[-1] in request.stop_token_ids
