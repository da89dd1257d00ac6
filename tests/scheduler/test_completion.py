"""When a sequence ends, and what it says about why."""

import pytest
from tests.scheduler.loop import Loop, make_request

from moestro.core.request import FinishReason, Sequence
from moestro.scheduler.completion import check_finish

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS, OWN = 2, 7


def finish(token_id: int, num_output: int = 3, max_len: int = 100, **params: object) -> object:
    """What check_finish says of the `num_output`-th output token after a prompt of 5."""
    request = make_request(
        "a",
        [9] * 5,
        max_tokens=10,
        eos_token_ids=(EOS,),
        stop_token_ids=(OWN,),
        **params,  # type: ignore[arg-type]
    )
    tokens = [9] * (5 + num_output - 1) + [token_id]
    return check_finish(Sequence(0, request, 0, tokens), token_id, max_len)


def test_an_ordinary_token_goes_on() -> None:
    assert finish(5) is None


def test_eos_stops_without_a_reason_and_own_stop_tokens_with_their_id() -> None:
    assert finish(EOS) == (STOP, None)
    assert finish(OWN) == (STOP, OWN)


def test_ignore_eos_goes_on_but_own_stop_tokens_still_count() -> None:
    assert finish(EOS, ignore_eos=True) is None
    assert finish(OWN, ignore_eos=True) == (STOP, OWN)


def test_eos_listed_as_own_stop_token_under_ignore_eos_is_the_users() -> None:
    request = make_request("a", [9], eos_token_ids=(EOS,), stop_token_ids=(EOS,), ignore_eos=True)
    assert check_finish(Sequence(0, request, 0, [9, EOS]), EOS, 100) == (STOP, EOS)


@pytest.mark.parametrize(("num_output", "stops"), [(1, False), (4, False), (5, True)])
def test_nothing_stops_before_min_tokens(num_output: int, stops: bool) -> None:
    """min_tokens 4: a stop token may be the 5th output token at the earliest."""
    for token_id in (EOS, OWN):
        assert (finish(token_id, num_output, min_tokens=4) is not None) == stops


def test_length() -> None:
    assert finish(5, num_output=9) is None
    assert finish(5, num_output=10) == (LENGTH, None)
    assert finish(5, num_output=3, max_len=9) is None
    assert finish(5, num_output=3, max_len=8) == (LENGTH, None)


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert finish(EOS, num_output=10) == (STOP, None)


def test_the_stop_token_is_part_of_the_output_and_nothing_follows_it() -> None:
    loop = Loop()
    probe = make_request("probe", [1, 2], max_tokens=8)
    loop.add(probe)
    loop.run()
    tokens = loop.results["probe", 0].token_ids
    loop.add(make_request("a", [1, 2], max_tokens=8, stop_token_ids=(tokens[4],)))
    loop.run()
    result = loop.results["a", 0]
    assert result.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (result.finish_reason, result.stop_reason) == (STOP, tokens[4])
