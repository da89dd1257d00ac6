"""A hand-cranked scheduler: tests say which sequence computes how many tokens in a step.

With drafts it plans as the real one may: more drafts than there are, and starts that hold only if
all of the last step's drafts were accepted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import (
    NewSequence,
    Schedule,
    ScheduledSequence,
    SequenceOutput,
    TokenLogprobs,
)
from moestro.runner.model_runner import ModelRunner


@dataclass
class Stream:
    """One sequence as the cranker sees it, with all it has been given."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    token_ids: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    known: bool = False
    drafts: tuple[int, ...] = ()
    rejected: int = 0
    accepted: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        """Known tokens not computed yet."""
        return len(self.token_ids) - self.computed


class Cranker:
    """Gives out pages in a shuffled order and turns wishes into schedules."""

    def __init__(
        self, runner: ModelRunner, num_pages: int, page_size: int, shuffle_seed: int = 0
    ) -> None:
        self.runner = runner
        self.page_size = page_size
        self.streams: dict[int, Stream] = {}
        self.free = list(range(num_pages))
        random.Random(shuffle_seed).shuffle(self.free)
        self._released: list[int] = []
        self._steps = 0

    def add(self, seq_id: int, stream: Stream) -> Stream:
        self.streams[seq_id] = stream
        return stream

    def release(self, seq_id: int) -> Stream:
        """Take a sequence from the runner, keeping its tokens (a preemption, or its end)."""
        stream = self.streams.pop(seq_id)
        self.free.extend(stream.pages)
        if stream.known:
            self._released.append(seq_id)
        stream.pages, stream.computed, stream.known = [], 0, False
        stream.drafts, stream.rejected = (), 0
        return stream

    def close(self) -> None:
        """Have the runner forget every sequence; the streams stay as they are."""
        known = (seq_id for seq_id, stream in self.streams.items() if stream.known)
        self.runner.execute(Schedule(self._steps, (), (), (*self._released, *known)))

    def step(
        self,
        wishes: Sequence[tuple[int, int]],
        masks: dict[int, bytes] | None = None,
        drafts: dict[int, tuple[int, int]] | None = None,
        *,
        ahead: bool = False,
    ) -> list[SequenceOutput]:
        """Compute (seq_id, at most so many tokens), in this order.

        drafts: of a sequence that samples, how many to verify at most and how many to propose.
        masks: one for each of its draws, alike. ahead: plan as if all drafts had been accepted.
        """
        items, new = [], []
        for seq_id, wish in wishes:
            stream = self.streams[seq_id]
            if not stream.known:
                new.append(self._introduce(seq_id, stream))
            count = min(wish, stream.remaining)
            end = stream.computed + count
            samples = end == len(stream.token_ids)
            verified, proposed = (drafts or {}).get(seq_id, (0, 0)) if samples else (0, 0)
            start = stream.computed + (stream.rejected if ahead and samples else 0)
            reach = max(start + count, end + proposed) + verified
            missing = max(0, -(-reach // self.page_size) - len(stream.pages))
            pages = [self.free.pop() for _ in range(missing)]
            given = tuple(pages) if stream.known else (*stream.pages, *pages)
            stream.pages += pages
            stream.known = True
            mask = (masks or {}).get(seq_id)
            allowed = None if mask is None else (mask,) * (1 + verified)
            items.append(
                ScheduledSequence(
                    seq_id, start, count + verified, given, samples, allowed, verified, proposed
                )
            )
            stream.computed = end
        schedule = Schedule(self._steps, tuple(items), tuple(new), tuple(self._released))
        self._released.clear()
        self._steps += 1
        output = self.runner.execute(schedule)
        assert output.step_id == schedule.step_id
        assert [o.seq_id for o in output.sequences] == [seq_id for seq_id, _ in wishes]
        for item, result in zip(items, output.sequences, strict=True):
            self._take(item, result)
        return list(output.sequences)

    def decode(self, seq_ids: Sequence[int], steps: int) -> None:
        for _ in range(steps):
            self.step([(seq_id, 1) for seq_id in seq_ids])

    def _introduce(self, seq_id: int, stream: Stream) -> NewSequence:
        delivered = len(stream.prompt_logprobs)
        wanted = stream.params.prompt_logprobs is not None
        return NewSequence(
            seq_id=seq_id,
            token_ids=tuple(stream.token_ids),
            num_prompt_tokens=len(stream.prompt),
            params=stream.params,
            seed=stream.seed,
            sample_index=stream.sample_index,
            stop_token_ids=stream.stop_token_ids,
            prompt_logprobs_from=delivered + 1 if wanted else None,
        )

    def _take(self, item: ScheduledSequence, result: SequenceOutput) -> None:
        stream = self.streams[item.seq_id]
        if result.error is not None:
            assert result == SequenceOutput(item.seq_id, error=result.error)
            stream.error = result.error
            return
        accepted = result.num_accepted_tokens
        if item.samples:
            assert result.num_draft_tokens == min(item.num_draft_tokens, len(stream.drafts))
            assert 1 <= len(result.token_ids) <= 1 + result.num_draft_tokens
            assert result.token_ids[:accepted] == stream.drafts[:accepted]
            stream.computed += accepted
            stream.rejected = item.num_draft_tokens - accepted
            stream.accepted.append(accepted)
            stream.drafts = result.draft_token_ids
        else:
            assert result.token_ids == result.draft_token_ids == ()
        assert len(result.draft_token_ids) <= item.num_next_drafts
        asked = stream.params.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) * asked
        stream.token_ids += result.token_ids
        stream.logprobs += result.logprobs
        stream.prompt_logprobs += result.prompt_logprobs


def alone(runner: ModelRunner, pages: int, page_size: int, stream: Stream, steps: int) -> Stream:
    """Run one stream by itself, its prompt whole, and give back what it became."""
    cranker = Cranker(runner, pages, page_size, shuffle_seed=1)
    cranker.add(-1, stream)
    cranker.step([(-1, len(stream.prompt))])
    cranker.decode([-1], steps - 1)
    cranker.release(-1)
    cranker.close()
    return stream
