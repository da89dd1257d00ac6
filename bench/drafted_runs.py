"""A batch that drafts, driven without a scheduler: what bench/speculation.py measures."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moestro.backends import load_backend
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence, SequenceOutput
from moestro.engine.build import LoadedModel
from moestro.runner.kv_pool import KVPool
from moestro.runner.model_runner import ModelRunner
from moestro.runner.sampler import Sampler
from moestro.runner.sequence_state import SequenceState
from moestro.speculative.drafter import Drafter
from moestro.speculative.verify import num_said

PAGE_SIZE = 64
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0)


class ForcedSampler(Sampler):
    """Draws as ever, and then says what a text says: its acceptance without a model that knows it.

    texts: whole token lists by sequence; a row behind drafts says what follows those of the text.
    """

    __slots__ = ("_texts",)

    def __init__(self, drawing: Sampler, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(drawing._pool)
        self._texts = texts

    def sample(
        self,
        logits: torch.Tensor,
        states: Sequence[SequenceState],
        masks: Sequence[bytes | None],
        widths: Sequence[int] | None = None,
        **options: Any,
    ) -> list[SequenceOutput]:
        drawn = super().sample(logits, states, masks, widths, **options)
        outputs = []
        self.row_token_ids = []
        for state, width, output in zip(states, widths or [1] * len(states), drawn, strict=True):
            begin = state.num_tokens
            draws = tuple(self._texts[state.seq_id][begin : begin + width])
            said = draws[: num_said(draws, state.drafts[: width - 1])]
            outputs.append(replace(output, token_ids=said))
            self.row_token_ids += draws
        return outputs


@dataclass
class Measured:
    """seconds of each step; tokens said in it, of all sequences; drafts verified.

    experts: of a layer, those that the rows of a step chose, the mean over layers and steps.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafts: int = 0
    experts: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / sum(self.seconds)

    def add(self, other: "Measured") -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.drafts += other.drafts


class DraftedBatch:
    """Sequences that decode together, with up to `num_drafts` drafts each in a step."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        room: int,
        num_drafts: int,
        drafter: Drafter | None = None,
        *,
        graphs: bool = True,
        texts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """room: tokens that a sequence may have; texts: what is said, whatever is drawn.

        Without texts it is sampled: greedy text of a random model soon repeats one token, whose
        rows all choose the same experts.
        """
        self._prompts, self._num_drafts = prompts, num_drafts
        self._params = SAMPLED if texts is None else GREEDY
        each = -(-(room + num_drafts + 1) // PAGE_SIZE)
        self._pages = [tuple(range(i * each, (i + 1) * each)) for i in range(len(prompts))]
        dtype = getattr(torch, loaded.plan.dtype)
        pool = KVPool(loaded.spec, each * len(prompts), PAGE_SIZE, dtype)
        self.runner = ModelRunner(
            loaded.model,
            pool,
            max_num_seqs=len(prompts),
            max_model_len=each * PAGE_SIZE,
            graph_pool=load_backend("cpu").graph_pool() if graphs else None,
            drafter=drafter,
        )
        if texts is not None:
            self.runner._sampler = ForcedSampler(self.runner._sampler, texts)
        self._steps = 0
        self.tokens: list[list[int]] = []
        self._drafts: list[int] = []

    def start(self) -> None:
        """Compute every prompt, from nothing."""
        released = tuple(range(len(self.tokens)))
        self.tokens = [list(prompt) for prompt in self._prompts]
        self._drafts = [0] * len(self.tokens)
        for i, prompt in enumerate(self._prompts):
            new = NewSequence(i, tuple(prompt), len(prompt), self._params, i, 0, frozenset())
            item = ScheduledSequence(
                i, 0, len(prompt), self._pages[i], True, num_next_drafts=self._num_drafts
            )
            self._run((item,), (new,), released)
            released = ()

    def step(self) -> int:
        """One step of all; the tokens said."""
        items = tuple(
            ScheduledSequence(
                i,
                len(tokens) - 1,
                1 + drafts,
                (),
                True,
                num_draft_tokens=drafts,
                num_next_drafts=self._num_drafts,
            )
            for i, (tokens, drafts) in enumerate(zip(self.tokens, self._drafts, strict=True))
        )
        return self._run(items, (), ())

    def decode(self, count: int) -> Measured:
        """Until every sequence has said `count` tokens more; timed."""
        goals = [len(tokens) + count for tokens in self.tokens]
        measured = Measured()
        while any(len(tokens) < goal for tokens, goal in zip(self.tokens, goals, strict=True)):
            measured.drafts += sum(self._drafts)
            began = time.perf_counter()
            said = self.step()
            measured.seconds.append(time.perf_counter() - began)
            measured.tokens.append(said)
        return measured

    def experts_a_step(self, count: int) -> float:
        """Experts of a layer that a step uses: the mean over the first so many tokens of each.

        For the runner that was made last, without graphs: the model counts for that one.
        """
        self.start()
        counter = self.runner._experts
        used: list[int] = []
        goals = [len(tokens) + count for tokens in self.tokens]
        counter.take()
        while any(len(tokens) < goal for tokens, goal in zip(self.tokens, goals, strict=True)):
            self.step()
            counted = counter.take()
            assert counted is not None
            used += [sum(n > 0 for n in each) for _, each in counted.rows()]
        return sum(used) / len(used)

    def _run(
        self,
        items: tuple[ScheduledSequence, ...],
        new: tuple[NewSequence, ...],
        released: tuple[int, ...],
    ) -> int:
        self._steps += 1
        output = self.runner.execute(Schedule(self._steps, items, new, released))
        said = 0
        for result in output.sequences:
            assert result.error is None
            self.tokens[result.seq_id] += result.token_ids
            self._drafts[result.seq_id] = len(result.draft_token_ids)
            said += len(result.token_ids)
        return said

    def close(self) -> None:
        self.runner.close()
