"""Engine: the loop of one rank, without tensors.

schedule -> runner.execute -> scheduler.update -> text and stop strings -> StepReport. Where the
scheduler plans ahead, the runner executes on a thread of its own: one step plans the next
schedule, then takes in the output of the last, while the device works.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from moestro.core.kv_events import KVEventSink
from moestro.core.kv_hints import (
    HintAnswer,
    HintedCache,
    HintRefusal,
    HintRequest,
    MissReason,
    PrefixUse,
)
from moestro.core.messages import EngineStats, ExplainPrefix, SequenceDelta, StepReport
from moestro.core.outputs import Logprob, RequestTiming
from moestro.core.request import FinishReason, Request
from moestro.core.step import Runner, Schedule, StepOutput, TokenLogprobs
from moestro.engine.detokenizer import Detokenizer, TokenVocabulary
from moestro.engine.request_state import RequestState, SequenceState
from moestro.engine.step_pipeline import InlineSteps, StepPipeline, ThreadedSteps
from moestro.engine.step_times import StepObserver, StepTimes
from moestro.errors import RequestError, shown
from moestro.scheduler import Scheduler, SequenceUpdate

logger = logging.getLogger(__name__)

_WAIT_S = 0.005
"""A step with nothing to compute sleeps so long at most, so that commands are heard."""
_FLUSH_S = 3.0
"""Pages on their way down have so long when the engine closes; then what the mover has accepted
has its own limit, and both together stay within 10 s."""


class TextVocabulary(TokenVocabulary, Protocol):
    """What the engine needs of a tokenizer."""

    def token_to_piece(self, token_id: int) -> str: ...


class _Submitted(NamedTuple):
    """A schedule under way, the requests whose first step it is, and when it was planned."""

    schedule: Schedule
    started: list[RequestState]
    planned: tuple[float, float]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread calls everything.

    What goes wrong with one request ends that request (finish_reason error); an exception out of
    step() means that the engine is broken. vocabulary None: token ids only, no text. clock:
    seconds, for the times of requests only; nothing is decided by it. cache: takes hints and
    questions; None refuses hints. event_sink: told after a step which pages came and went; the
    engine closes it. pipeline: executes in place of one around the runner. observer: told after
    each step when who worked on it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        vocabulary: TextVocabulary | None = None,
        clock: Callable[[], float] = time.monotonic,
        cache: HintedCache | None = None,
        event_sink: KVEventSink | None = None,
        pipeline: StepPipeline | None = None,
        observer: StepObserver | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        if pipeline is None:
            pipeline = ThreadedSteps(runner) if scheduler.plans_ahead else InlineSteps(runner)
        self._pipeline = pipeline
        self._submitted: deque[_Submitted] = deque()
        self.observer = observer
        self._vocabulary = vocabulary
        self._clock = clock
        self._cache = cache
        self._event_sink = event_sink
        self._requests: dict[str, RequestState] = {}
        self._waiting: dict[int, RequestState] = {}  # by first_seq_id, until its first step
        self._pending: list[SequenceDelta] = []
        self._times: list[RequestTiming] = []

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
        state = RequestState(
            request,
            first.seq_id,
            self._clock(),
            {
                index: SequenceState(
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
        answers = {seq.index: seq.hint_answer for seq in self._scheduler.abort(request_id)}
        last = max(state.sequences)
        for index, sequence in state.sequences.items():
            text = sequence.detokenizer.feed((), last=True).text if sequence.detokenizer else ""
            self._pending.append(
                SequenceDelta(
                    request_id,
                    index,
                    text=text,
                    finish_reason=FinishReason.ABORT,
                    timing=state.timing() if index == last else None,
                    hint_answer=_dated(answers.get(index)),
                )
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
        stats = self._scheduler.stats()
        return stats if self._cache is None else replace(stats, kv=self._cache.tier_stats())

    def answer(
        self,
        command: HintRequest | ExplainPrefix,
        tell: Callable[[HintAnswer | PrefixUse], None],
    ) -> None:
        """Take a hint or answer a question, between two steps.

        tell: called once with the answer; between two later steps where the store is asked.
        """
        cache = self._cache
        if isinstance(command, ExplainPrefix):
            if cache is None:
                tell(PrefixUse(miss=MissReason.CACHING_OFF))
            else:
                cache.explain(command.token_ids, command.cache_salt, tell)
        elif cache is None:
            num_tokens = len(command.token_ids or ())
            tell(HintAnswer(clipped=num_tokens, refused=HintRefusal.CACHING_OFF))
        else:
            answer = _dated(cache.hint(command))
            self._tell_events()
            tell(answer)

    def step(self) -> StepReport:
        """Take in the output of one step and report it; deltas in the order of the schedule, aborts
        first. The steps after it are planned before that, as far as they can be."""
        deltas, self._pending = self._pending, []
        while self._scheduler.may_plan and self._submit():
            pass
        expert_tokens = None
        if self._submitted:
            submitted = self._submitted[0]
            output = self._pipeline.collect()
            self._submitted.popleft()
            expert_tokens = output.expert_tokens
            deltas += self._apply(submitted, output)
        elif self._scheduler.has_work() and not deltas:
            self._scheduler.wait(_WAIT_S)
        times, self._times = self._times, []
        return StepReport(tuple(deltas), self.stats(), tuple(times), expert_tokens)

    def _submit(self) -> bool:
        """Plan a step and have it executed; False when there is none to plan now."""
        began_s = self._clock()
        schedule = self._scheduler.schedule()
        if schedule is None:
            return False
        started = self._note_starts(schedule)
        self._submitted.append(_Submitted(schedule, started, (began_s, self._clock())))
        self._pipeline.submit(schedule)
        return True

    def _apply(self, submitted: _Submitted, output: StepOutput) -> list[SequenceDelta]:
        """What the step changed, as text."""
        schedule, started, planned = submitted
        for state in started:
            state.load_host_s += output.load_s
        began_s = self._clock()
        updates = self._scheduler.update(schedule, output)
        if output.ended_s:
            self._scheduler.note_step(schedule, output.seconds)
        if not (schedule.sequences or schedule.released or schedule.loads or updates):
            raise RuntimeError(f"step {schedule.step_id} has requests but schedules nothing")
        deltas = [d for u in updates if (d := self._digest(u, began_s)) is not None]
        if not self._scheduler.has_work():
            self._scheduler.tend()  # what this step computed begins to sink
        self._tell_events()
        if self.observer is not None:
            self.observer(
                StepTimes(
                    schedule.step_id,
                    len(schedule.sequences),
                    schedule.num_tokens,
                    planned,
                    (output.began_s, output.ended_s),
                    (began_s, self._clock()),
                )
            )
        return deltas

    def tend(self) -> bool:
        """Let KV pages go on sinking while there is no work; whether some still do."""
        is_moving = self._scheduler.tend()
        self._tell_events()
        return is_moving

    def close(self) -> None:
        """Drop all requests and release the runner's memory."""
        try:
            self.abort_all()
            self.discard_pending()
            self._pipeline.close()
            stop_s = self._clock() + _FLUSH_S
            while self._scheduler.tend() and self._clock() < stop_s:
                self._scheduler.wait(_WAIT_S)
        finally:  # a broken cache must keep neither memory nor clients waiting
            self._pipeline.close()
            self._runner.close()
            if self._event_sink is not None:
                self._event_sink.close()

    def _tell_events(self) -> None:
        if self._event_sink is not None and self._cache is not None:
            events = self._cache.take_events()
            if events:
                self._event_sink.publish(events)

    def _note_starts(self, schedule: Schedule) -> list[RequestState]:
        """The requests whose first step it is."""
        started = []
        for new in schedule.new_sequences:
            state = self._waiting.pop(new.seq_id, None)
            if state is not None:
                state.started_s = self._clock()
                started.append(state)
        return started

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
        text, hint_answer, timing = "", update.hint_answer, None
        if sequence.detokenizer is not None:
            piece = sequence.detokenizer.feed(
                token_ids,
                last=reason is not None,
                ended_by_token=_ends_with_stop_token(state.request, update),
            )
            text, token_ids = piece.text, token_ids[: piece.num_tokens]
            if piece.stop is not None:
                if reason is None:
                    hint_answer = self._scheduler.finish(
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
        if update.index == 0:
            state.prefix = update.prefix
        prompt_logprobs = self._prompt_logprobs(state, update)
        if reason is not None:
            timing = self._forget(state, update.index)
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
            timing,
            _dated(hint_answer),
        )

    def _forget(self, state: RequestState, index: int) -> RequestTiming | None:
        """A sequence has ended; with the last one its request has: the times of that."""
        del state.sequences[index]
        if state.sequences:
            return None
        del self._requests[state.request.request_id]
        self._waiting.pop(state.first_seq_id, None)
        timing = state.timing()
        if timing is not None:
            self._times.append(timing)
        return timing

    def _prompt_logprobs(
        self, state: RequestState, update: SequenceUpdate
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


_A = TypeVar("_A", HintAnswer, HintAnswer | None)


def _dated(answer: _A) -> _A:
    """With the end of its pin as a calendar date, for people."""
    if answer is None or answer.expires_in_s is None:
        return answer
    return replace(answer, expires_at=time.time() + answer.expires_in_s)


def _ends_with_stop_token(request: Request, update: SequenceUpdate) -> bool:
    """Whether the last new token is what ended the sequence (a grammar may end one too)."""
    if update.finish_reason is not FinishReason.STOP or not update.new_token_ids:
        return False
    return update.new_token_ids[-1] in request.stop_token_ids
