"""Drafts are verified to the bit: whatever they are, what is said is what would have been said."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runner.history_model import POISON, VOCAB, history_runner
from tests.runner.stepping import Cranker, Stream
from tests.runner.test_graphs import make, stream
from tests.runner.test_history import GREEDY, NO_POISON, greedy_continuation, prompt_of
from tests.runner.test_model_runner import HY3, PAGE_SIZE, PAGES, PARAMS, QWEN

from moestro.backends.cpu import library
from moestro.core.model_spec import ModelSpec
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.runner.model_runner import ModelRunner
from moestro.speculative.drafter import ComputedStep, DraftedSequence
from moestro.speculative.verify import num_said

Guess = Callable[[DraftedSequence], tuple[int, ...]]


class Guessing:
    """A drafter that proposes what a function says, and keeps what it was shown."""

    def __init__(self, guess: Guess, *, reads_hidden_states: bool = False) -> None:
        self.guess = guess
        self.reads_hidden_states = reads_hidden_states
        self.steps: list[ComputedStep] = []
        self.released: list[int] = []

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        self.steps.append(step)
        return [self.guess(sequence)[: sequence.num_wanted] for sequence in step.sequences]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released += seq_ids

    def warm_up(self, sizes: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_drafts_count_while_they_are_drawn(draws: list[int], data: st.DataObject):
    size = len(draws) - 1
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    accepted = next((i for i in range(size) if draws[i] != drafts[i]), size)
    assert num_said(draws, drafts) == accepted + 1


def history_guess(rng: np.random.Generator, truth: float) -> Guess:
    """The model's own greedy continuation, each token with some probability another one."""

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        tokens = tuple(sequence.token_ids.tolist())
        right = greedy_continuation(tokens, sequence.num_wanted)
        wrong = rng.integers(0, POISON, len(right)).tolist()
        chances = rng.random(len(right)) < truth
        return tuple(r if c else w for r, w, c in zip(right, wrong, chances, strict=True))

    return guess


@given(st.data())
@settings(max_examples=60)
def test_any_schedule_with_drafts_gives_the_expected_tokens(data: st.DataObject):
    """Random arrivals, chunks, orders, widths, preemptions, plans made ahead."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    drafter = Guessing(history_guess(rng, data.draw(st.sampled_from((0.0, 0.6, 0.9, 1.0)))))
    cranker = Cranker(history_runner(num_pages=96, drafter=drafter), 96, 4)
    next_id = 0
    for _ in range(data.draw(st.integers(5, 30))):
        live = list(cranker.streams)
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "step", "preempt"]))
        if action == "add" and len(live) < 8 and len(cranker.free) > 24:
            prompt = prompt_of(data.draw(st.integers(1, 17)), next_id)
            cranker.add(next_id, Stream(prompt, NO_POISON))
            next_id += 1
        elif action == "step" and live:
            chosen = data.draw(st.permutations(live))[: data.draw(st.integers(1, len(live)))]
            wishes, drafts = [], {}
            for seq_id in chosen:
                if len(cranker.free) > 16 and len(cranker.streams[seq_id].token_ids) < 100:
                    wishes.append((seq_id, data.draw(st.integers(1, 9))))
                    drafts[seq_id] = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
            if wishes:
                cranker.step(wishes, drafts=drafts, ahead=data.draw(st.booleans()))
        elif action == "preempt" and live:
            seq_id = data.draw(st.sampled_from(live))
            stream = cranker.release(seq_id)
            cranker.add(next_id, stream)
            next_id += 1
    for stream in cranker.streams.values():
        assert stream.error is None
        assert stream.output == greedy_continuation(stream.prompt, len(stream.output))


def run(runner: ModelRunner, rng: np.random.Generator | None) -> list[Stream]:
    """Six sequences with every option; verify rows beside prefill chunks, alone and together."""
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    streams = [cranker.add(i, stream(i, PARAMS[i])) for i in range(6)]
    masks = {2: bytes([0b11101111] * 48)}
    for round_ in range(80):
        live = [i for i in range(min(round_ + 1, 6)) if len(streams[i].output) < 18]
        if round_ % 5 == 4:
            live = live[:1]
        drafts = {}
        if rng is not None:
            drafts = {i: tuple(rng.integers(0, 6, 2).tolist()) for i in live}
            if round_ % 3 == 0:
                drafts = dict.fromkeys(live, (3, 3))
        if live:
            cranker.step([(i, 4) for i in live], masks, drafts, ahead=round_ % 2 == 0)
    assert min(len(s.output) for s in streams) >= 18
    return streams


def cut(stream: Stream) -> tuple[list[int], object, object]:
    """What both have: with drafts some are further than others."""
    return stream.output[:18], stream.logprobs[:18], stream.prompt_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [QWEN, HY3], ids=lambda spec: spec.model_type)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_bits_are_those_without_drafts(
    spec: ModelSpec, dtype: torch.dtype, graphs: bool
) -> None:
    if graphs and not library.has_native():
        pytest.skip("no kernel library was built here")
    expected = run(make(spec, dtype, graphs=False), None)
    texts = [tuple(s.token_ids) for s in expected]
    rng = np.random.default_rng(1)

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        length = len(sequence.token_ids)
        text = texts[sequence.seq_id]
        assert tuple(sequence.token_ids.tolist()) == text[:length] or length > len(text)
        right = text[length : length + sequence.num_wanted]
        return tuple(t if rng.random() < 0.8 else (t + 1) % 300 for t in right)

    drafter = Guessing(guess)
    mine = run(make(spec, dtype, graphs=graphs, drafter=drafter), np.random.default_rng(2))
    for one, other in zip(mine, expected, strict=True):
        assert one.error is None
        assert cut(one) == cut(other)
    accepted = [n for s in mine for n in s.accepted]
    assert set(accepted) >= {0, 1, 2, 3}


def test_rows_behind_a_draft_see_it_as_said() -> None:
    """min_tokens, penalties and bias change along the accepted drafts, here all of them."""
    prompt = (4, 8, 8, 20, 33)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.8,
        presence_penalty=0.6,
        min_tokens=4,
        logit_bias=((POISON, -100.0), (4, 5.0), (5, 4.9), (7, 30.0)),
    )
    stops = frozenset({7})
    plain = Cranker(history_runner(), 64, 4)
    expected = plain.add(0, Stream(prompt, params, stop_token_ids=stops))
    plain.step([(0, 5)])
    plain.decode([0], 14)
    assert 7 not in expected.output[:4]
    assert expected.output[4] == 7

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        return tuple(expected.token_ids[len(sequence.token_ids) :])

    cranker = Cranker(history_runner(drafter=Guessing(guess)), 64, 4)
    mine = cranker.add(0, Stream(prompt, params, stop_token_ids=stops))
    cranker.step([(0, 5)], drafts={0: (0, 6)})
    for k in (6, 2, 3):
        cranker.step([(0, 1)], drafts={0: (k, 3)})
    assert mine.accepted == [0, 6, 2, 3]
    assert mine.output == expected.output[: len(mine.output)]


def test_an_error_behind_an_accepted_draft_comes_when_its_row_is_the_first() -> None:
    prompt = prompt_of(5, 0)
    right = greedy_continuation(prompt, 9)
    seen = [0]

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        seen[0] += 1
        at = len(sequence.token_ids) - len(prompt)
        return (*right[at : at + 1], 1, POISON) if seen[0] == 1 else (right[at], POISON, POISON)

    cranker = Cranker(history_runner(drafter=Guessing(guess)), 64, 4)
    good = cranker.add(0, Stream(prompt, NO_POISON))
    cranker.step([(0, 5)], drafts={0: (0, 3)})
    for _ in range(3):  # rows behind a rejected POISON are not finite, and nobody minds
        cranker.step([(0, 1)], drafts={0: (3, 3)})
    assert good.error is None
    assert good.output == right[: len(good.output)]

    width = -(-VOCAB // 8)
    plain = Cranker(history_runner(), 64, 4)
    forced = SamplingParams(temperature=0.0, logit_bias=((POISON, 100.0),))
    mask = bytes([255] * width)
    alone = plain.add(0, Stream(prompt, forced))
    plain.step([(0, 5)], {0: mask})
    plain.step([(0, 1)], {0: mask})
    assert alone.output == [POISON]
    drafter = Guessing(lambda _: (POISON, POISON))
    cranker = Cranker(history_runner(drafter=drafter), 64, 4)
    bad = cranker.add(0, Stream(prompt[:4], GREEDY))
    bad.params = forced
    cranker.step([(0, 3)])
    cranker.step([(0, 1)], drafts={0: (0, 2)})
    cranker.step([(0, 1)], drafts={0: (2, 2)})
    assert bad.error == alone.error
    assert "not finite" in (bad.error or "")


def test_a_run_of_accepted_tokens_ends_before_the_one_that_cannot_be_drawn() -> None:
    prompt = prompt_of(5, 3)
    right = greedy_continuation(prompt, 6)
    width = -(-VOCAB // 8)
    nothing, anything = bytes(width), bytes([255] * (width - 1) + [0b1111])
    cranker = Cranker(history_runner(drafter=Guessing(lambda _: tuple(right[1:4]))), 64, 4)
    mine = cranker.add(0, Stream(prompt, NO_POISON))
    cranker.step([(0, 5)], drafts={0: (0, 3)})
    item = ScheduledSequence(0, 5, 4, (8, 9), True, (anything, anything, nothing, anything), 3)
    (output,) = cranker.runner.execute(Schedule(9, (item,))).sequences
    assert (output.token_ids, output.error, output.num_draft_tokens) == (tuple(right[1:3]), None, 3)
    item = ScheduledSequence(0, 9, 1, (), True, (nothing,))
    (output,) = cranker.runner.execute(Schedule(10, (item,))).sequences
    assert output.token_ids == ()
    assert "no token is allowed" in (output.error or "")
    assert mine.output == right[:1]


@pytest.mark.parametrize("graphs", [True, False])
def test_a_drafter_that_reads_hidden_states_sees_every_row(graphs: bool) -> None:
    if graphs and not library.has_native():
        pytest.skip("no kernel library was built here")
    texts = [tuple(s.token_ids) for s in run(make(HY3, torch.float32, graphs=False), None)]
    rng = np.random.default_rng(1)

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        length = len(sequence.token_ids)
        right = texts[sequence.seq_id][length : length + sequence.num_wanted]
        return tuple(t if rng.random() < 0.8 else (t + 1) % 300 for t in right)

    hidden: dict[tuple[int, int], torch.Tensor] = {}
    checked = [0]

    class Checking(Guessing):
        def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
            rows = len(step.positions)
            assert step.hidden_states.shape == (rows, HY3.hidden_size)
            assert step.next_token_ids.dtype == torch.int64
            assert len(step.next_token_ids) == len(step.attention.slot_mapping) == rows
            starts = step.attention.query_start_loc.tolist()
            assert starts[-1] == rows
            assert step.attention.max_query_len == max(np.diff(starts))
            assert step.attention.max_seq_len == step.attention.seq_lens.max()
            for sequence in step.sequences:
                length = len(sequence.token_ids)
                assert step.positions[sequence.row] == length - 2
                assert step.next_token_ids[sequence.row] == sequence.token_ids[-1]
                owner = next(i for i, end in enumerate(starts[1:]) if sequence.row < end)
                for row in range(starts[owner], sequence.row + 1):
                    position = int(step.positions[row])
                    assert step.next_token_ids[row] == sequence.token_ids[position + 1]
                    page = sequence.page_table[position // PAGE_SIZE]
                    slot = page * PAGE_SIZE + position % PAGE_SIZE
                    assert step.attention.slot_mapping[row] == slot
                    key = (sequence.seq_id, position)
                    first = hidden.setdefault(key, step.hidden_states[row].clone())
                    assert torch.equal(first, step.hidden_states[row])
                    checked[0] += 1
            return super().propose(step)

    drafter = Checking(guess, reads_hidden_states=True)
    run(make(HY3, torch.float32, graphs=graphs, drafter=drafter), np.random.default_rng(2))
    assert checked[0] > 100
    assert all(int(s.next_token_ids.min()) >= 0 for s in drafter.steps)


def test_the_last_row_of_a_chunk_has_the_next_prompt_token() -> None:
    drafter = Guessing(lambda _: (), reads_hidden_states=True)
    cranker = Cranker(history_runner(drafter=drafter), 64, 4)
    one, other = prompt_of(9, 0), prompt_of(3, 1)
    cranker.add(0, Stream(one, NO_POISON))
    cranker.add(1, Stream(other, NO_POISON))
    cranker.step([(0, 4)])
    cranker.step([(1, 3), (0, 2)])
    found = [step.next_token_ids.tolist() for step in drafter.steps]
    assert found[0] == list(one[1:5])
    assert found[1] == [*other[1:], cranker.streams[1].output[0], *one[5:7]]
    assert [len(step.sequences) for step in drafter.steps] == [0, 1]


def test_others_are_asked_only_for_drafts_and_told_of_what_is_released() -> None:
    drafter = Guessing(lambda _: (1, 2, 3))
    cranker = Cranker(history_runner(drafter=drafter), 64, 4)
    cranker.add(0, Stream(prompt_of(5, 0), NO_POISON))
    cranker.add(1, Stream(prompt_of(3, 1), NO_POISON))
    cranker.step([(0, 5), (1, 3)])
    assert not drafter.steps
    cranker.step([(0, 1), (1, 1)], drafts={1: (0, 2)})
    assert [s.num_wanted for s in drafter.steps[0].sequences] == [0, 2]
    cranker.release(1)
    cranker.step([(0, 1)])
    assert drafter.released == [1]
    assert len(drafter.steps) == 1


def test_schedules_that_contradict_the_drafts_are_refused() -> None:
    new = NewSequence(0, (1, 2, 3), 3, NO_POISON, 0, 0, frozenset())
    first = ScheduledSequence(0, 0, 3, (0, 1), True, None, 0, 2)
    for start, count, drafts, match in (
        (4, 3, 2, "positions \\[4, 7\\) with samples=True and 2 drafts, but 4"),  # one ahead
        (2, 3, 2, "4 of its tokens are known"),
        (3, 2, 2, "4 of its tokens are known"),
        (3, 6, 5, None),  # fewer drafts than planned
    ):
        runner = history_runner(drafter=Guessing(lambda _: (5, 6)))
        runner.execute(Schedule(0, (first,), (new,)))
        item = ScheduledSequence(0, start, count, (2,), True, None, drafts)
        if match is None:
            (output,) = runner.execute(Schedule(1, (item,))).sequences
            assert output.num_draft_tokens == 2
        else:
            with pytest.raises(ValueError, match=match):
                runner.execute(Schedule(1, (item,)))
    runner = history_runner(drafter=Guessing(lambda _: (5, 6)))
    runner.execute(Schedule(0, (first,), (new,)))
    item = ScheduledSequence(0, 3, 9, (2,), True, None, 2)
    with pytest.raises(ValueError, match="4 of its tokens are known"):
        runner.execute(Schedule(1, (item,)))


def test_too_many_drafts_are_refused() -> None:
    class Greedy(Guessing):
        def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
            return [self.guess(sequence) for sequence in step.sequences]

    cranker = Cranker(history_runner(drafter=Greedy(lambda _: (1, 2, 3))), 64, 4)
    cranker.add(0, Stream(prompt_of(5, 0), NO_POISON))
    with pytest.raises(ValueError, match="3 drafts for sequence 0, which wants 2"):
        cranker.step([(0, 5)], drafts={0: (0, 2)})


def test_blocks_of_logits_keep_a_sequence_together() -> None:
    right = {i: greedy_continuation(prompt_of(3 + i, i), 30) for i in range(5)}

    def guess(sequence: DraftedSequence) -> tuple[int, ...]:
        return tuple(right[sequence.seq_id][len(sequence.token_ids) - 3 - sequence.seq_id :])

    for rows in (1, 3, 7, 100):
        drafter = Guessing(guess)
        runner = history_runner(drafter=drafter, logits_block_bytes=rows * 4 * VOCAB)
        cranker = Cranker(runner, 64, 4)
        for i in range(5):
            cranker.add(i, Stream(prompt_of(3 + i, i), NO_POISON))
        for _ in range(4):
            cranker.step([(i, 9) for i in range(5)], drafts={i: (i, i) for i in range(5)})
        for i, each in cranker.streams.items():
            assert each.output == right[i][: len(each.output)]
            assert len(each.output) == 1 + 3 * (1 + i)


@pytest.mark.skipif(not library.has_native(), reason="no kernel library was built here")
def test_one_graph_serves_every_way_to_share_out_its_rows() -> None:
    drafter = Guessing(lambda s: tuple(range(s.num_wanted)))
    runner = make(HY3, torch.bfloat16, graphs=True, drafter=drafter)
    cranker = Cranker(runner, PAGES, PAGE_SIZE)
    for i in range(3):
        cranker.add(i, stream(i, GREEDY))
        cranker.step([(i, 99)], drafts={i: (0, 4)})
    before = runner.num_graphs
    for widths in ((4, 0, 1), (0, 1, 4), (2, 2, 1), (1, 3, 1)):
        cranker.step([(i, 1) for i in range(3)], drafts={i: (widths[i], 4) for i in range(3)})
    assert runner.num_graphs == before + 1
    runner.warm_up(num_drafts=3)
    assert runner.num_graphs == before + 1 + 10
