"""InputBuilder: the arrays of one batch, checked by hand."""

import pytest

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence, Schedule, ScheduledSequence
from moestro.runner.forward_batch import ForwardBatch, ScoredRun
from moestro.runner.inputs import InputBuilder
from moestro.runner.page_table import PageTable

PARAMS = SamplingParams()


def new(seq_id: int, count: int, prompt_logprobs_from: int | None = None) -> NewSequence:
    token_ids = tuple(range(100 * seq_id, 100 * seq_id + count))
    return NewSequence(seq_id, token_ids, count, PARAMS, 0, 0, frozenset(), prompt_logprobs_from)


def build(builder: InputBuilder, schedule: Schedule) -> ForwardBatch:
    builder.admit(schedule)
    return builder.build(schedule, builder.states(schedule))


def test_a_mixed_batch():
    builder = InputBuilder(4, 64, 4)
    first = (
        ScheduledSequence(1, 0, 6, (9, 2), True),
        ScheduledSequence(2, 0, 3, (7,), False),
    )
    batch = build(builder, Schedule(0, first, (new(1, 6, 0), new(2, 9, 0))))
    assert batch.input_ids.tolist() == [100, 101, 102, 103, 104, 105, 200, 201, 202]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    attention = batch.attention
    assert attention.query_start_loc.tolist() == [0, 6, 9]
    assert attention.seq_lens.tolist() == [6, 3]
    assert attention.page_table.tolist() == [[9, 2], [7, 0]]
    assert attention.slot_mapping.tolist() == [36, 37, 38, 39, 8, 9, 28, 29, 30]
    assert (attention.max_query_len, attention.max_seq_len) == (6, 6)
    assert batch.sampled == (0,)
    assert batch.scored == (ScoredRun(0, 0, 5), ScoredRun(1, 0, 3))
    assert batch.logits_indices.tolist() == [5, 0, 1, 2, 3, 4, 6, 7, 8]

    for state in builder.states(Schedule(0, first[:1])):
        state.append(33)
    second = (
        ScheduledSequence(2, 3, 6, (0, 5), True),
        ScheduledSequence(1, 6, 1, (), True),
    )
    batch = build(builder, Schedule(1, second))
    assert batch.input_ids.tolist() == [203, 204, 205, 206, 207, 208, 33]
    assert batch.attention.page_table.tolist() == [[7, 0, 5], [9, 2, 0]]
    assert batch.attention.slot_mapping.tolist() == [31, 0, 1, 2, 3, 20, 10]
    assert batch.sampled == (0, 1)
    assert batch.scored == (ScoredRun(0, 3, 5),)
    assert batch.logits_indices.tolist() == [5, 6, 0, 1, 2, 3, 4]


def test_a_decode_batch_takes_one_token_each():
    builder = InputBuilder(3, 64, 4)
    for seq_id in (1, 2, 3):
        builder.admit(Schedule(0, (), (new(seq_id, 5),)))
    items = tuple(ScheduledSequence(i, 4, 1, (i, 10 + i), True) for i in (3, 1, 2))
    batch = build(builder, Schedule(1, items))
    assert batch.input_ids.tolist() == [304, 104, 204]
    assert batch.positions.tolist() == [4, 4, 4]
    assert batch.attention.page_table.tolist() == [[3, 13], [1, 11], [2, 12]]
    assert batch.attention.slot_mapping.tolist() == [52, 44, 48]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 2, 3]
    assert batch.logits_indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("wanted_from", "run"), [(0, (0, 4)), (1, (0, 4)), (3, (2, 2)), (4, (3, 1)), (5, None)]
)
def test_scoring_starts_before_the_first_wanted_position(
    wanted_from: int, run: tuple[int, int] | None
):
    builder = InputBuilder(1, 64, 4)
    items = (ScheduledSequence(1, 0, 5, (0, 1), True),)
    batch = build(builder, Schedule(0, items, (new(1, 5, wanted_from),)))
    assert batch.scored == (() if run is None else (ScoredRun(0, *run),))


def test_a_freed_row_is_clean_for_the_next_sequence():
    table = PageTable(2, 16, 4)
    row, other = table.take_row(), table.take_row()
    with pytest.raises(ValueError, match="max_num_seqs=2"):
        table.take_row()
    table.append(row, (5, 6))
    table.append(row, (7,))
    assert table.pages[row].tolist() == [5, 6, 7, 0, 0]
    assert (table.capacity(row), table.capacity(other)) == (12, 0)
    table.give_row(row)
    assert not table.pages.any()
    assert table.take_row() == row
    with pytest.raises(ValueError, match="6 pages; max_model_len allows 5"):
        table.append(row, (1, 2, 3, 4, 5, 6))
