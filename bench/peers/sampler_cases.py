"""Sampling cases that every engine gets alike: options and logits. Torch only."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class SamplingCase:
    """Options of all rows. history: tokens before, half of them prompt, for the penalties."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    history: int = 0
    logprobs: int = -1
    masked: bool = False
    flat: bool = False

    @property
    def has_penalties(self) -> bool:
        return (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)


CASES = (
    SamplingCase("greedy", temperature=0.0),
    SamplingCase("temperature", temperature=0.8),
    SamplingCase("top-k 20", temperature=0.8, top_k=20),
    SamplingCase("top-k 1000", temperature=0.8, top_k=1000),
    SamplingCase("top-p 0.9", temperature=0.8, top_p=0.9),
    SamplingCase("top-p 0.9, flat logits", top_p=0.9, flat=True),
    SamplingCase("min-p 0.05", min_p=0.05),
    SamplingCase("penalties", repetition=1.1, frequency=0.2, presence=0.1, history=1024),
    SamplingCase("grammar mask", masked=True),
    SamplingCase("5 logprobs", logprobs=5),
    SamplingCase(
        "k 20, p 0.9, T 1.05, r 1.1",
        temperature=1.05,
        top_k=20,
        top_p=0.9,
        repetition=1.1,
        history=1024,
    ),
)


def logits_of(case: SamplingCase, rows: int, vocab: int, seed: int) -> torch.Tensor:
    """[rows, vocab] fp32. A model's shape: a broad floor and some dozens of tokens far above it;
    flat: normal numbers, whose top_p 0.9 is half of the vocabulary."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=g)
    if not case.flat:
        logits *= 2.0
        at = torch.randint(0, vocab, (rows, 40), generator=g)
        peaks = 18.0 - 1.5 * torch.rand((rows, 40), generator=g).log().neg().cumsum(1)
        logits.scatter_(1, at, peaks)
    return logits


def history_of(case: SamplingCase, rows: int, vocab: int) -> torch.Tensor:
    """[rows, history] int64 token ids."""
    g = torch.Generator().manual_seed(5)
    return torch.randint(0, vocab, (rows, case.history), generator=g)


def mask_of(rows: int, vocab: int) -> torch.Tensor:
    """[rows, vocab] bool: allowed, a tenth of the vocabulary."""
    return torch.rand((rows, vocab), generator=torch.Generator().manual_seed(6)) < 0.1


def case_of(name: str) -> Any:
    """The case of that name."""
    return next(case for case in CASES if case.name == name)
