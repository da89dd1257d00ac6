"""The oracle itself: it accepts a correct schedule and names every broken rule."""

from dataclasses import replace

import pytest
from tests.fakes.scripted_runner import Script, ScriptedRunner, prefix_hashes

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence

GREEDY = SamplingParams(temperature=0.0)


def new(seq_id: int, *token_ids: int) -> NewSequence:
    return NewSequence(seq_id, token_ids, len(token_ids), GREEDY, 0, 0, frozenset())


def run(seq_id: int, start: int, num_tokens: int, *pages: int, samples: bool) -> ScheduledSequence:
    return ScheduledSequence(seq_id, start, num_tokens, pages, samples)


def runner_after_prefill() -> ScriptedRunner:
    """Pages of 2; sequence 0 has computed its prompt [1, 2, 3] in pages 0 and 1."""
    runner = ScriptedRunner(8, 2, max_num_seqs=2, max_num_batched_tokens=6)
    first = Schedule(0, (run(0, 0, 3, 0, 1, samples=True),), (new(0, 1, 2, 3),))
    assert len(runner.execute(first).sequences[0].token_ids) == 1
    return runner


def test_a_correct_continuation_with_a_prefix_hit_passes() -> None:
    runner = runner_after_prefill()
    step = Schedule(
        1,
        (run(0, 3, 1, samples=True), run(1, 2, 2, 0, 2, samples=True)),
        (new(1, 1, 2, 9, 9),),
    )
    assert [len(o.token_ids) for o in runner.execute(step).sequences] == [1, 1]
    assert runner.known_sequences == {0, 1}
    runner.execute(Schedule(2, (run(1, 4, 1, 1, samples=True),), released=(0,)))


DECODE = run(0, 3, 1, samples=True)
BROKEN = [
    (Schedule(0, (DECODE,)), "steps out of order"),
    (Schedule(1, (DECODE, DECODE)), "scheduled twice"),
    (Schedule(1, (DECODE,), released=(5,)), "never introduced"),
    (Schedule(1, (DECODE,), released=(0, 0)), "released twice"),
    (Schedule(1, (DECODE,), (new(1, 1, 2),)), "new but not scheduled"),
    (Schedule(1, (DECODE,), (new(0, 1, 2),)), "new twice"),
    (Schedule(1, (run(0, 2, 2, samples=True),)), "does not follow"),
    (Schedule(1, (run(0, 3, 0, samples=True),)), "empty run"),
    (Schedule(1, (run(0, 3, 2, 2, samples=True),)), "beyond the known tokens"),
    (Schedule(1, (run(0, 3, 1, samples=False),)), "samples is wrong"),
    (Schedule(1, (run(0, 3, 1, 1, samples=True),)), "twice in a table"),
    (Schedule(1, (run(0, 3, 1, 8, samples=True),)), "no such page"),
    (Schedule(1, (run(1, 0, 3, 2, samples=True),), (new(1, 1, 2, 3),)), "too short"),
    (Schedule(1, (run(1, 0, 7, 2, 3, 4, 5, samples=True),), (new(1, *range(7)),)), "budget"),
    (Schedule(1, (run(1, 0, 1, 0, samples=True),), (new(1, 1),)), "written while shared"),
    (Schedule(1, (run(1, 2, 1, 0, 1, samples=True),), (new(1, 1, 2, 3),)), "still writes"),
    (Schedule(1, (run(1, 2, 1, 0, 2, samples=True),), (new(1, 1, 7, 3),)), "shared wrongly"),
    (Schedule(1, (run(1, 1, 1, 0, samples=True),), (new(1, 1, 2),)), "inside a page"),
    (Schedule(1, (run(1, 2, 1, 4, 5, samples=True),), (new(1, 1, 2, 3),)), "wrong KV"),
]


@pytest.mark.parametrize(("schedule", "why"), BROKEN, ids=[why for _, why in BROKEN])
def test_a_broken_rule_is_named(schedule: Schedule, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        runner_after_prefill().execute(schedule)


def test_a_page_reused_under_a_reader_is_found() -> None:
    runner = runner_after_prefill()
    stolen = Schedule(1, (run(1, 0, 2, 0, samples=True),), (new(1, 8, 8),))
    runner._check_sharing = lambda: None  # type: ignore[method-assign]
    runner.execute(stolen)
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        runner.execute(Schedule(2, (DECODE,)))


def test_more_sequences_than_allowed_are_found() -> None:
    runner = ScriptedRunner(8, 2, max_num_seqs=1)
    runs = (run(0, 0, 1, 0, samples=True), run(1, 0, 1, 1, samples=True))
    with pytest.raises(AssertionError, match="max_num_seqs"):
        runner.execute(Schedule(0, runs, (new(0, 1), new(1, 1))))


def test_tokens_depend_on_seed_index_and_history_only() -> None:
    script = Script(vocab_size=1000)
    base = new(0, 1, 2, 3)

    def say(introduced: NewSequence, *history: int) -> int:
        return script.token(introduced, len(history), prefix_hashes(history)[-1], None)

    same = say(base, 1, 2, 3)
    assert say(replace(base, seq_id=9), 1, 2, 3) == same
    others = {
        say(replace(base, seed=1), 1, 2, 3),
        say(replace(base, sample_index=1), 1, 2, 3),
        say(base, 2, 1, 3),
        same,
    }
    assert len(others) == 4


def test_masks_and_min_tokens_are_obeyed() -> None:
    script = Script(vocab_size=16)
    base = replace(new(0, 1), stop_token_ids=frozenset({3}))
    assert script.token(base, 1, 123, b"\x08\x00") == 3
    patient = replace(base, params=SamplingParams(min_tokens=1))
    with pytest.raises(AssertionError, match="allows nothing"):
        script.token(patient, 1, 123, b"\x08\x00")
