"""Engines that draft what a test says, for the equalities with and without speculation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.e2e.models import model_options
from tests.e2e.workload import Signature

from moestro import LLM
from moestro.speculative.drafter import ComputedStep, Drafter
from moestro.speculative.injected import InjectedDrafter, KnownTexts

OPTIONS = {
    "max_model_len": 512,
    "page_size": 16,
    "num_threads": 1,
    "kv_cache_memory_bytes": 32_000_000,
}


class Watching(InjectedDrafter):
    """Counts what it proposes."""

    num_drafted = 0

    def propose(self, step: ComputedStep) -> list[tuple[int, ...]]:
        drafts = super().propose(step)
        self.num_drafted += sum(map(len, drafts))
        return drafts


def texts_of(signatures: Sequence[Signature]) -> list[tuple[int, ...]]:
    """Prompt and output of every sequence, as one token list each."""
    return [(*s[0], *choice[1]) for s in signatures for choice in s[2]]


@contextmanager
def drafting(
    name: str, num_drafts: int, drafter: Drafter | None = None, **options: Any
) -> Iterator[LLM]:
    """An engine that drafts always so many tokens: by prompt lookup, or by the given drafter."""
    config = {"method": "ngram", "num_speculative_tokens": num_drafts, "adaptive": False}
    given = OPTIONS | model_options(name) | {"speculative_config": config} | options
    with pytest.MonkeyPatch.context() as patch:
        if drafter is not None:
            patch.setattr("moestro.engine.build.make_drafter", lambda *_, **__: drafter)
        llm = LLM(**given)
    with llm:
        yield llm


def injected(texts: Sequence[Sequence[int]], acceptance: float, seed: int = 0) -> Watching:
    """Each draft right with that probability, as far as the texts are known."""
    return Watching(KnownTexts(texts), (acceptance,), 300, seed=seed)
