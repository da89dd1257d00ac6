"""The loop: text, stops, errors and aborts, over scripted runners."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.byte_vocabulary import ByteVocabulary
from tests.engine.small_engine import ask, deltas_of, make_engine, replay, run
from tests.fakes.scripted_runner import Script, ScriptedRunner

from moestro.core.kv_hints import MissReason, PrefixUse
from moestro.core.outputs import Logprob, RequestTiming
from moestro.core.request import FinishReason
from moestro.core.step import Schedule
from moestro.errors import RequestError

EOS = ByteVocabulary.EOS


def test_text_and_tokens_until_eos() -> None:
    output = run(make_engine(replay([*b"hi", EOS])), ask("a", [1, 0]))["a"]
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("hi", [*b"hi", EOS])
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, None)
    assert output.finished


def test_length_and_unfinished_character() -> None:
    euro = "\u20ac".encode()
    completion = run(make_engine(replay(b"a" + euro)), ask("a", [0], max_tokens=3))["a"].outputs[0]
    assert (completion.text, completion.finish_reason) == ("a\ufffd", FinishReason.LENGTH)
    assert completion.token_ids == [*b"a", *euro[:2]]


@pytest.mark.parametrize("burst", [1, 3])
def test_stop_string_cuts_text_tokens_and_logprobs(burst: int) -> None:
    engine = make_engine(replay(b"one END two", burst=burst))
    request = ask("a", [0], stop=["END"], logprobs=1)
    completion = run(engine, request)["a"].outputs[0]
    assert completion.text == "one "
    assert completion.token_ids == [*b"one END"]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "END")


def test_stop_string_wins_over_length_at_the_same_token() -> None:
    engine = make_engine(replay(b"xxEND"))
    completion = run(engine, ask("a", [0], stop=["END"], max_tokens=5))["a"].outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, "END")


def test_stop_string_in_a_burst_wins_over_a_later_eos() -> None:
    engine = make_engine(replay([*b"aENDb", EOS], burst=6))
    completion = run(engine, ask("a", [0], stop=["END"]))["a"].outputs[0]
    assert (completion.text, completion.stop_reason) == ("a", "END")
    assert completion.token_ids == [*b"aEND"]


def test_min_tokens_lets_an_early_stop_string_pass() -> None:
    engine = make_engine(replay(b"END and END"))
    completion = run(engine, ask("a", [0], stop=["END"], min_tokens=4))["a"].outputs[0]
    assert completion.text == "END and "


def test_stop_token_of_the_request_is_the_reason() -> None:
    engine = make_engine(replay(b"ab.c"))
    request = ask("a", [0], stop_token_ids=[ord(".")], include_stop_str_in_output=True)
    completion = run(engine, request)["a"].outputs[0]
    assert (completion.text, completion.stop_reason) == ("ab.", ord("."))


def test_logprobs_start_with_the_token_and_add_up() -> None:
    output = run(make_engine(replay(b"ab")), ask("a", [5, 0], max_tokens=2, logprobs=2))["a"]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert list(completion.logprobs[0].items()) == [
        (ord("a"), Logprob(-1.5, 2, "a")),
        (ord("b"), Logprob(-0.5, 1, "b")),
    ]
    assert completion.cumulative_logprob == -3.0
    assert output.prompt_logprobs is None


@pytest.mark.parametrize("length", [1, 2, 40])
def test_prompt_logprobs_start_with_none_and_hold_the_prompt(length: int) -> None:
    prompt = [*range(1, length), 0]
    output = run(make_engine(replay(b"a")), ask("a", prompt, max_tokens=1, prompt_logprobs=1))["a"]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    heads = [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry]
    assert heads == prompt[1:]


def test_without_a_vocabulary_there_is_no_text() -> None:
    engine = make_engine(replay(b"ab"), with_text=False)
    completion = run(engine, ask("a", [0], max_tokens=2, logprobs=1))["a"].outputs[0]
    assert (completion.text, completion.token_ids) == ("", [*b"ab"])
    assert completion.logprobs is not None
    assert completion.logprobs[0][ord("a")].decoded_token is None


def test_detokenize_off_gives_ids_only() -> None:
    completion = run(make_engine(replay(b"ab")), ask("a", [0], max_tokens=2, detokenize=False))
    assert completion["a"].outputs[0].text == ""


def test_a_failing_sequence_ends_alone() -> None:
    outputs = run(
        make_engine(replay(b"", b"fine", poison=0)), ask("bad", [0]), ask("good", [1], max_tokens=4)
    )
    bad = outputs["bad"].outputs[0]
    assert (bad.finish_reason, bad.stop_reason) == (FinishReason.ERROR, "non-finite logits")
    assert outputs["good"].outputs[0].text == "fine"


def test_abort_gives_what_was_held_and_ends_once() -> None:
    engine = make_engine(replay(b"abcdef"))
    engine.add_request(ask("a", [0], stop=["bx"]))
    texts = [d.text for _ in range(2) for d in engine.step().deltas]
    assert texts == ["a", ""]
    engine.abort("a")
    engine.abort("a")
    engine.abort("unknown")
    report = engine.step()
    assert [(d.text, d.finish_reason) for d in report.deltas] == [("b", FinishReason.ABORT)]
    assert not engine.has_work()
    assert report.stats.num_running == 0


def test_abort_before_the_first_step() -> None:
    engine = make_engine(replay(b"abcdef"))
    engine.add_request(ask("a", [0], n=2))
    engine.abort("a")
    assert [(d.index, d.finish_reason) for d in deltas_of(engine)] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]


def test_ids_must_be_unique_while_in_use() -> None:
    engine = make_engine(replay(b"ab"))
    engine.add_request(ask("a", [0], max_tokens=1))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request(ask("a", [0]))
    deltas_of(engine)
    engine.add_request(ask("a", [0], max_tokens=1))
    assert deltas_of(engine)[-1].finish_reason is FinishReason.LENGTH


def test_refused_requests_are_reported() -> None:
    engine = make_engine(replay(b"ab"))
    engine.refuse(ask("a", [0], n=2), "no")
    assert [(d.index, d.error) for d in deltas_of(engine)] == [(0, "no"), (1, "no")]


def test_close_releases_the_runner() -> None:
    runner = replay(b"abc")
    engine = make_engine(runner)
    engine.add_request(ask("a", [0]))
    engine.step()
    engine.close()
    assert runner.closed
    assert not engine.has_work()


def test_a_schedule_that_does_nothing_is_an_error_not_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(replay(b"a"))
    engine.add_request(ask("a", [0]))
    schedule = engine._scheduler.schedule

    def idle() -> Schedule | None:
        planned = schedule()
        assert planned is not None
        return dataclasses.replace(planned, sequences=(), new_sequences=())

    monkeypatch.setattr(engine._scheduler, "schedule", idle)
    monkeypatch.setattr(engine._scheduler, "update", lambda *_: [])
    with pytest.raises(RuntimeError, match="schedules nothing"):
        engine.step()


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    st.integers(8, 40),
    st.integers(1, 20),
    st.integers(1, 3),
)
def test_requests_do_not_see_each_other(
    asked: list[tuple[list[int], int]], num_pages: int, step_tokens: int, burst: int
) -> None:
    """Together in a small pool = one by one in a large one, text and all."""
    script = Script(vocab_size=ByteVocabulary.SIZE, max_burst=burst)
    requests = [
        ask(str(i), prompt, n=n, max_tokens=12, stop=["\ufffdz", "q"], logprobs=1)
        for i, (prompt, n) in enumerate(asked)
    ]
    small = make_engine(
        ScriptedRunner(num_pages, 4, script), num_pages=num_pages, max_tokens=step_tokens
    )
    together = run(small, *requests)
    for request in requests:
        alone = run(make_engine(ScriptedRunner(64, 4, script)), request)[request.request_id]
        theirs = together[request.request_id]
        assert theirs.outputs == alone.outputs


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_times_of_a_request() -> None:
    """16 tokens a step: 40 of the first prompt take three steps, the second one waits two."""
    clock = Clock()
    engine = make_engine(replay(b"ab", b"cde"), clock=clock)
    engine.add_request(ask("long", [*range(39), 0], max_tokens=2))
    clock.now_s = 0.5
    engine.add_request(ask("short", [9, 1], max_tokens=3, n=2))
    found = []
    while engine.has_work():
        clock.now_s += 1
        found += engine.step().times
    assert found == [
        RequestTiming(
            queue_s=1.5,
            prefill_s=2.0,
            decode_s=1.0,
            first_token_s=3.5,
            prefix=PrefixUse(miss=MissReason.NO_PREFIX),
        ),
        RequestTiming(queue_s=3.0, prefill_s=0.0, decode_s=2.0, first_token_s=3.0),
    ]


def test_times_of_requests_that_never_ran_or_were_aborted_are_not_told() -> None:
    engine = make_engine(replay(b"abc"))
    for name in ("running", "waiting"):
        engine.add_request(ask(name, [*range(30), 0]))
    engine.step()
    engine.abort("running")
    engine.abort("waiting")
    report = engine.step()
    assert len(report.deltas) == 2
    assert report.times == ()
    assert not engine._waiting
