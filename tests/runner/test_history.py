"""The runner over the history model: every slot, page, position and length must be right."""

import gc
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runner.history_model import POISON, VOCAB, expected_logits, history_runner
from tests.runner.stepping import Cranker, Stream

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.runner.sequence_state import SequenceState
from moestro.runner.token_tally import TokenTally

GREEDY = SamplingParams(temperature=0.0)


def greedy_continuation(prompt: tuple[int, ...], steps: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(expected_logits(tokens)[:POISON].argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, POISON, length).tolist())


NO_POISON = SamplingParams(temperature=0.0, logit_bias=((POISON, -100.0),))


@given(st.data())
@settings(max_examples=60)
def test_any_schedule_gives_the_expected_tokens(data: st.DataObject):
    """Random arrivals, chunk sizes, orders, preemptions and releases."""
    cranker = Cranker(history_runner(), 64, 4, data.draw(st.integers(0, 5)))
    next_id = 0
    for _ in range(data.draw(st.integers(5, 40))):
        live = list(cranker.streams)
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "preempt", "end"]))
        if action == "add" and len(live) < 8 and len(cranker.free) > 16:
            prompt = prompt_of(data.draw(st.integers(1, 17)), next_id)
            cranker.add(next_id, Stream(prompt, NO_POISON))
            next_id += 1
        elif action == "step" and live:
            chosen = data.draw(st.permutations(live))[: data.draw(st.integers(1, len(live)))]
            wishes = [(s, data.draw(st.integers(1, 9))) for s in chosen if _fits(cranker, s)]
            if wishes:
                cranker.step(wishes)
        elif action in ("preempt", "end") and live:
            seq_id = data.draw(st.sampled_from(live))
            stream = cranker.release(seq_id)
            _check(stream)
            if action == "preempt":
                cranker.add(next_id, stream)
                next_id += 1
    for stream in cranker.streams.values():
        _check(stream)


def _fits(cranker: Cranker, seq_id: int) -> bool:
    return len(cranker.free) > 4 and len(cranker.streams[seq_id].token_ids) < 100


def _check(stream: Stream) -> None:
    assert stream.error is None
    assert stream.output == greedy_continuation(stream.prompt, len(stream.output))


def test_pages_shared_with_another_sequence_give_the_same_tokens():
    """A prefix hit: the second sequence starts in the middle, over the first one's pages."""
    runner = history_runner()
    cranker = Cranker(runner, 64, 4)
    prompt = prompt_of(11, 3)
    first = cranker.add(0, Stream(prompt, NO_POISON))
    cranker.step([(0, 11)])
    second = cranker.add(1, Stream(prompt, NO_POISON))
    second.pages, second.computed = first.pages[:2], 8
    cranker.step([(1, 99), (0, 1)])
    cranker.decode([0, 1], 3)
    assert second.output == greedy_continuation(prompt, 4)
    assert first.output == greedy_continuation(prompt, 5)


def test_a_poisoned_sequence_ends_alone():
    cranker = Cranker(history_runner(), 64, 4)
    good = cranker.add(0, Stream(prompt_of(5, 0), NO_POISON))
    bad = cranker.add(1, Stream((1, POISON, 2), SamplingParams(temperature=1.0, logprobs=2)))
    scored = cranker.add(2, Stream((1, 2, POISON, 3), SamplingParams(prompt_logprobs=1)))
    late = cranker.add(3, Stream(prompt_of(6, 1), NO_POISON))
    cranker.step([(0, 5), (1, 3), (2, 4), (3, 6)])
    assert "not finite" in (bad.error or "")
    assert "not finite" in (scored.error or "")
    cranker.release(1)
    cranker.release(2)
    cranker.decode([3, 0], 2)
    assert good.output == greedy_continuation(good.prompt, 3)
    assert late.output == greedy_continuation(late.prompt, 3)


def test_a_grammar_mask_limits_the_choice_and_nothing_allowed_is_an_error():
    cranker = Cranker(history_runner(), 64, 4)
    for seq_id in range(3):
        cranker.add(seq_id, Stream(prompt_of(5, 7), SamplingParams(temperature=seq_id * 0.7)))
    width = -(-VOCAB // 8)
    only_9 = bytes([0, 0b10]) + bytes(width - 2)
    cranker.step([(0, 5), (1, 5), (2, 5)], {0: only_9, 1: bytes(width)})
    zero, one, two = (cranker.streams[i] for i in range(3))
    assert zero.output == [9]
    assert "no token is allowed" in (one.error or "")
    assert two.error is None
    with pytest.raises(ValueError, match="61 tokens need 8"):
        cranker.step([(0, 1)], {0: bytes(3)})


def test_min_tokens_suppresses_stop_tokens_until_enough_are_out():
    prompt = prompt_of(6, 2)
    favourite = greedy_continuation(prompt, 1)[0]
    params = SamplingParams(temperature=0.0, min_tokens=2, logit_bias=((favourite, 50.0),))
    cranker = Cranker(history_runner(), 64, 4)
    stream = cranker.add(0, Stream(prompt, params, stop_token_ids=frozenset({favourite, POISON})))
    cranker.step([(0, 6)])
    cranker.decode([0], 2)
    assert favourite not in stream.output[:2]
    assert POISON not in stream.output[:2]
    assert stream.output[2] == favourite


def test_penalties_see_prompt_and_output_also_after_preemption():
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.8,
        presence_penalty=0.6,
        logit_bias=((POISON, -100.0), (4, 5.0), (5, 4.9)),
    )
    prompt = (4, 8, 8, 20, 33)
    tokens = list(prompt)
    for _ in range(11):
        x = expected_logits(tokens).astype(np.float64)
        x[POISON] -= 100.0
        x[[4, 5]] += (5.0, 4.9)
        output = tokens[len(prompt) :]
        for token in set(tokens):
            x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
            count = output.count(token)
            x[token] -= 0.8 * count + 0.6 * (count > 0)
        tokens.append(int(x.argmax()))
    cranker = Cranker(history_runner(), 64, 4)
    cranker.add(0, Stream(prompt, params))
    cranker.step([(0, 5)])
    cranker.decode([0], 5)
    stream = cranker.add(1, cranker.release(0))
    cranker.step([(1, 7)])
    cranker.step([(1, 7)])
    cranker.decode([1], 4)
    assert stream.output == tokens[len(prompt) :]
    assert len(set(stream.output)) < len(stream.output) or max(stream.output) > 5


@pytest.mark.parametrize("block_rows", [1, 2, 100])
@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [2, 6, 1], [3, 3, 3]])
def test_prompt_logprobs_over_chunk_borders(chunks: list[int], block_rows: int):
    prompt = prompt_of(9, 5)
    runner = history_runner(logits_block_bytes=block_rows * 4 * VOCAB)
    cranker = Cranker(runner, 64, 4)
    stream = cranker.add(0, Stream(prompt, SamplingParams(temperature=0.0, prompt_logprobs=3)))
    other = cranker.add(1, Stream(prompt_of(4, 6), SamplingParams(prompt_logprobs=0, logprobs=2)))
    counts = []
    for at, chunk in enumerate(chunks):
        before = len(stream.prompt_logprobs)
        cranker.step([(0, chunk), (1, 2)] if at < 2 else [(0, chunk)])
        counts.append(len(stream.prompt_logprobs) - before)
    assert counts == [*chunks[:-1], chunks[-1] - 1]
    assert [len(e.token_ids) for e in other.prompt_logprobs] == [1] * len(other.prompt_logprobs)
    for position, entry in enumerate(stream.prompt_logprobs):
        x = expected_logits(prompt[: position + 1]).astype(np.float64)
        exact = x - x.max() - math.log(np.exp(x - x.max()).sum())
        order = np.argsort(-x, kind="stable").tolist()
        assert entry.token_ids == (prompt[position + 1], *order[:3])
        assert entry.ranks == tuple(1 + order.index(t) for t in entry.token_ids)
        assert entry.logprobs == pytest.approx(exact[list(entry.token_ids)], abs=1e-12)


def test_prompt_logprobs_resume_after_preemption_without_repeats():
    prompt = prompt_of(10, 8)
    params = SamplingParams(temperature=0.0, prompt_logprobs=1)
    whole = Cranker(history_runner(), 64, 4)
    expected = whole.add(0, Stream(prompt, params))
    whole.step([(0, 10)])
    cranker = Cranker(history_runner(), 64, 4)
    cranker.add(0, Stream(prompt, params))
    cranker.step([(0, 4)])
    stream = cranker.add(1, cranker.release(0))
    for chunk in (3, 3, 4):
        cranker.step([(1, chunk)])
    assert stream.prompt_logprobs == expected.prompt_logprobs
    assert len(stream.prompt_logprobs) == 9


def test_logprobs_are_those_before_bias_mask_penalties_and_temperature():
    prompt = prompt_of(5, 9)
    params = SamplingParams(
        temperature=0.3, logit_bias=((7, 90.0),), repetition_penalty=1.9, logprobs=2, seed=1
    )
    cranker = Cranker(history_runner(), 64, 4)
    stream = cranker.add(0, Stream(prompt, params))
    mask = bytes([0b10000000]) + bytes(-(-VOCAB // 8) - 1)
    cranker.step([(0, 5)], {0: mask})
    x = expected_logits(prompt).astype(np.float64)
    exact = x - math.log(np.exp(x).sum())
    (entry,) = stream.logprobs
    assert entry.token_ids == (7, *np.argsort(-x, kind="stable")[:2].tolist())
    assert entry.logprobs == pytest.approx(exact[list(entry.token_ids)], abs=1e-12)


def test_schedules_that_contradict_the_past_are_refused():
    def run(start: int, count: int, pages: tuple[int, ...], samples: bool) -> Schedule:
        return Schedule(1, (ScheduledSequence(0, start, count, pages, samples),))

    new = NewSequence(0, (1, 2, 3), 3, GREEDY, 0, 0, frozenset())
    for schedule, match in (
        (run(0, 4, (0, 1), True), "3 of its tokens are known"),
        (run(0, 2, (0, 1), True), "samples=True"),
        (run(0, 0, (0, 1), False), "are known"),
        (run(0, 3, (), True), "its pages hold 0 tokens"),
        (run(0, 3, tuple(range(40)), True), "max_model_len allows"),
        (Schedule(1, (), (new,)), "never released"),
        (
            Schedule(
                1,
                (),
                tuple(NewSequence(i, (1,), 1, GREEDY, 0, 0, frozenset()) for i in range(1, 9)),
            ),
            "max_num_seqs=8",
        ),
    ):
        runner = history_runner()
        runner.execute(Schedule(0, (), (new,)))
        with pytest.raises(ValueError, match=match):
            runner.execute(schedule)


def test_an_empty_schedule_does_nothing():
    output = history_runner().execute(Schedule(7, ()))
    assert (output.step_id, output.sequences) == (7, ())


def test_a_long_run_keeps_nothing_of_what_is_released():
    def kept() -> int:
        gc.collect()
        return sum(type(o) in (SequenceState, TokenTally) for o in gc.get_objects())

    def traced_by_the_runner() -> int:
        gc.collect()
        mine = tracemalloc.Filter(True, "*/moestro/runner/*")
        traces = tracemalloc.take_snapshot().filter_traces((mine,)).statistics("filename")
        return sum(trace.size for trace in traces)

    before = kept()
    cranker = Cranker(history_runner(), 64, 4)
    params = SamplingParams(repetition_penalty=1.1, logprobs=1, logit_bias=((POISON, -100.0),))
    tracemalloc.start()
    sizes = []
    for first in range(0, 244, 4):
        ids = range(first, first + 4)
        for seq_id in ids:
            cranker.add(seq_id, Stream(prompt_of(20, seq_id), params))
        cranker.step([(i, 20) for i in ids])
        cranker.decode(ids, 3)
        for i in ids:
            cranker.release(i)
        if first in (40, 240):
            sizes.append(traced_by_the_runner())
    tracemalloc.stop()
    assert sizes[1] < sizes[0] + 200 * 200  # 200 sequences; interpreter caches take some
    cranker.step([])
    assert kept() == before
