"""What the runner remembers of a sequence."""

from moestro.core.sampling_params import SamplingParams
from moestro.core.step import NewSequence
from moestro.runner.sequence_state import SequenceState


def make(params: SamplingParams) -> SequenceState:
    new = NewSequence(
        seq_id=0,
        token_ids=(5, 6),
        num_prompt_tokens=2,
        params=params,
        seed=0,
        sample_index=0,
        stop_token_ids=frozenset({2, 9}),
    )
    return SequenceState(new, row=0)


def biases(state: SequenceState) -> dict[int, float]:
    token_ids, values = state.token_bias()
    return dict(zip(token_ids.tolist(), values.tolist(), strict=True))


def test_without_options_there_is_no_bias() -> None:
    assert biases(make(SamplingParams())) == {}


def test_stop_tokens_are_held_back_until_min_tokens() -> None:
    state = make(SamplingParams(logit_bias={7: 1.5, 9: 2.0}, min_tokens=2))
    for _ in range(2):
        assert biases(state) == {7: 1.5, 2: float("-inf"), 9: float("-inf")}
        state.append(1)
    assert biases(state) == {7: 1.5, 9: 2.0}


def test_a_bias_is_made_once() -> None:
    state = make(SamplingParams(logit_bias=dict.fromkeys(range(1000), -1.0)))
    first = state.token_bias()
    state.append(1)
    assert state.token_bias() is first


def test_drafts_lie_behind_the_known_tokens_until_they_are_said() -> None:
    state = make(SamplingParams())
    state.propose(tuple(range(10, 50)))
    assert (state.num_tokens, state.token_ids.tolist()) == (2, [5, 6])
    assert state.tokens_at(1, 4).tolist() == [6, 10, 11, 12]
    state.append(10)
    state.append(7)
    assert state.token_ids.tolist() == [5, 6, 10, 7]
    state.propose((8,))
    assert (state.drafts, state.token_at(4)) == ((8,), 8)


def test_a_run_may_begin_ahead_by_what_two_runs_did_not_say() -> None:
    state = make(SamplingParams())
    seen = []
    for draws, said in ((1, 1), (4, 1), (3, 2), (2, 2), (1, 1)):
        state.end_run(draws, said)
        seen.append(state.num_unsaid)
    assert seen == [0, 3, 4, 1, 0]
