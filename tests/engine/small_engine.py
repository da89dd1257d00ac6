"""Engines over fakes: real scheduler and KV accounting, scripted tokens, byte vocabulary."""

import time
from collections.abc import Callable
from typing import Any

from tests.engine.byte_vocabulary import ByteVocabulary
from tests.engine.replay_runner import ReplayRunner

from moestro.core.messages import SequenceDelta
from moestro.core.outputs import RequestOutput
from moestro.core.request import Request
from moestro.core.sampling_params import SamplingParams
from moestro.core.step import Runner
from moestro.engine.engine import Engine
from moestro.engine.request_progress import RequestProgress
from moestro.kvcache.manager import KVCacheManager
from moestro.scheduler import Scheduler, SchedulerLimits

PAGE_SIZE = 4


def make_engine(
    runner: Runner,
    *,
    num_pages: int = 64,
    with_text: bool = True,
    max_tokens: int = 16,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Engine:
    """An engine of max_tokens tokens a step; options: the Engine's own."""
    scheduler = Scheduler(
        SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=max_tokens, max_model_len=200),
        KVCacheManager(num_pages, PAGE_SIZE),
        vocab_size=ByteVocabulary.SIZE,
    )
    return Engine(scheduler, runner, ByteVocabulary() if with_text else None, clock, **options)


def replay(*replies: bytes | list[int], **options: Any) -> ReplayRunner:
    """Prompts that end in byte n get reply n."""
    return ReplayRunner(dict(enumerate(replies)), **options)


def ask(request_id: str, prompt: list[int], *, max_tokens: int = 30, **params: Any) -> Request:
    """A request as the input processor would make it; EOS ends it."""
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    eos = frozenset() if sampling.ignore_eos else frozenset({ByteVocabulary.EOS})
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=sampling,
        seed=0,
        max_tokens=max_tokens,
        stop_token_ids=eos | set(sampling.stop_token_ids),
        eos_token_ids=eos,
    )


def run(engine: Engine, *requests: Request) -> dict[str, RequestOutput]:
    """Run requests to their end, by id."""
    progresses = {r.request_id: RequestProgress(r) for r in requests}
    for request in requests:
        engine.add_request(request)
    for delta in deltas_of(engine):
        progresses[delta.request_id].add(delta)
    return {name: progress.output() for name, progress in progresses.items()}


def deltas_of(engine: Engine) -> list[SequenceDelta]:
    """Everything until the engine has no work."""
    deltas = []
    while engine.has_work():
        deltas += engine.step().deltas
    return deltas
