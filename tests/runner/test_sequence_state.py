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
