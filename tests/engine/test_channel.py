"""Channels: whole, in order, ended properly; every message survives pickling."""

import pickle
import threading
import time

import pytest

from moestro.core.grammar import GrammarSpec
from moestro.core.messages import (
    AbortRequest,
    AddRequest,
    EngineFailed,
    EngineStats,
    SequenceDelta,
    Shutdown,
    StepReport,
)
from moestro.core.outputs import Logprob
from moestro.core.request import FinishReason, Request
from moestro.core.sampling_params import SamplingParams
from moestro.engine.channel import channel_pair


def test_messages_arrive_in_order_and_end() -> None:
    here, there = channel_pair()
    here.send(1)
    here.send(2)
    here.close()
    assert (there.receive(), there.receive(0)) == (1, 2)
    for _ in range(2):
        with pytest.raises(EOFError):
            there.receive(0)
    with pytest.raises(BrokenPipeError):
        there.send(3)
    with pytest.raises(BrokenPipeError):
        here.send(3)


def test_timeouts() -> None:
    here, _ = channel_pair()
    assert here.receive(0) is None
    assert here.receive(0.01) is None


def test_closing_wakes_whoever_waits_on_either_end() -> None:
    here, there = channel_pair()
    ended: list[str] = []

    def wait(end: object, name: str) -> None:
        with pytest.raises(EOFError):
            end.receive()  # type: ignore[attr-defined]
        ended.append(name)

    threads = [threading.Thread(target=wait, args=a) for a in ((here, "here"), (there, "there"))]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    here.close()
    here.close()
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == ["here", "there"]


REQUEST = Request(
    request_id="r",
    prompt_token_ids=(1, 2),
    params=SamplingParams(stop=["x"], logit_bias={3: 1.0}, grammar=GrammarSpec("regex", "a*")),
    seed=7,
    max_tokens=3,
    stop_token_ids=frozenset({2}),
    eos_token_ids=frozenset({2}),
    prompt="p",
)
DELTA = SequenceDelta(
    "r",
    0,
    (1,),
    "a",
    ({1: Logprob(-0.5, 1, "a")},),
    (None, {2: Logprob(-1.0)}),
    64,
    FinishReason.STOP,
    "x",
    None,
)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(REQUEST),
        AbortRequest("r"),
        Shutdown(drain=False),
        StepReport((DELTA,), EngineStats(num_running=1)),
        EngineFailed("why"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_every_message_survives_pickling(message: object) -> None:
    assert pickle.loads(pickle.dumps(message)) == message
