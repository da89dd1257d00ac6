"""The counts and biases of rows behind drafts, against counting from scratch."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence
from moestro.runner.batch_edits import BiasRows, CountRows
from moestro.runner.sequence_state import SequenceState

TOKENS = st.integers(0, 9)


def make(seq_id: int, prompt: list[int], params: SamplingParams) -> SequenceState:
    new = NewSequence(seq_id, tuple(prompt), len(prompt), params, 0, 0, frozenset({3}))
    return SequenceState(new, row=seq_id)


@given(st.data())
@settings(max_examples=80)
def test_counts_follow_tokens_and_drafts(data: st.DataObject) -> None:
    penalized = SamplingParams(repetition_penalty=1.1)
    states = [
        make(i, data.draw(st.lists(TOKENS, min_size=1, max_size=5)), params)
        for i, params in enumerate((penalized, SamplingParams(), penalized))
    ]
    depths = [data.draw(st.integers(0, 4)) for _ in states]
    rows = [(s, j) for s, depth in zip(states, depths, strict=True) for j in range(depth + 1)]
    kept = CountRows(rows)
    for _ in range(data.draw(st.integers(1, 8))):
        for state, depth in zip(states, depths, strict=True):
            count = data.draw(st.sampled_from((0, 1, 3, 12)))
            some = st.integers(0, data.draw(st.sampled_from((9, 400))))
            for token in data.draw(st.lists(some, min_size=count, max_size=count)):
                state.append(token)
            state.propose(tuple(data.draw(st.lists(TOKENS, min_size=depth, max_size=depth))))
        if data.draw(st.booleans()):
            continue  # another layout's turn
        counts = kept.update()
        assert counts is not None
        for at, (state, depth) in enumerate(rows):
            begin, size = int(counts.starts[at]), int(counts.sizes[at])
            ids = counts.token_ids[begin : begin + size].tolist()
            numbers = counts.output_counts[begin : begin + size].tolist()
            if state.tally is None:
                assert ids == []
                continue
            output = [*state.token_ids[state.num_prompt_tokens :].tolist(), *state.drafts[:depth]]
            prompt = dict.fromkeys(state.token_ids[: state.num_prompt_tokens].tolist(), 0)
            assert len(set(ids)) == len(ids)
            assert dict(zip(ids, numbers, strict=True)) == prompt | Counter(output)


def test_min_tokens_ends_among_the_drafts() -> None:
    state = make(0, [1], SamplingParams(min_tokens=2))
    rows = [(state, depth) for depth in range(4)]
    kept = BiasRows(rows)
    bias = kept.update()
    assert bias is not None
    assert bias.sizes.tolist() == [1, 1, 0, 0]
    assert bias.token_ids.tolist() == [3, 3]
    assert kept.update() is bias
    state.append(5)
    bias = kept.update()
    assert bias is not None
    assert bias.sizes.tolist() == [1, 0, 0, 0]
    state.append(5)
    assert kept.update() is None
