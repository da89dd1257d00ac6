"""One set of requests for all equalities, and what two runs of it must have in common."""

from typing import Any

import pytest

from moestro import LLM, RequestOutput, SamplingParams
from moestro.backends.cpu.library import has_native

NEEDS_KERNELS = pytest.mark.skipif(
    not has_native(), reason="the reference bodies do not promise the same bits (no compiler)"
)

Signature = tuple[Any, ...]

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logprobs=3)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=16, seed=7, logprobs=2)

PREFIX = [5 + 7 * i % 211 for i in range(70)]


def requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts from 1 to 200 tokens, some with a common beginning, greedy and sampled."""
    assert vocab_size >= 300
    return [
        ([9], GREEDY),
        ([*PREFIX, 20, 21, 22], GREEDY),
        ([*PREFIX, 30], SAMPLED),
        (PREFIX[:40], SAMPLED.with_(top_p=0.9, top_k=40, seed=8)),
        ([3 + 11 * i % 257 for i in range(200)], GREEDY.with_(prompt_logprobs=2)),
        ([3 + 29 * i * i % 290 for i in range(33)], SAMPLED.with_(n=3, min_p=0.02)),
        (
            [50 + i % 17 for i in range(48)],
            SAMPLED.with_(
                seed=None,
                repetition_penalty=1.2,
                presence_penalty=0.3,
                frequency_penalty=0.2,
                logit_bias={11: 2.0},
                min_tokens=4,
            ),
        ),
    ]


def signature(output: RequestOutput) -> Signature:
    """All that must not depend on how a request was run: tokens, text, every logprob's bits."""
    return (
        tuple(output.prompt_token_ids),
        _bits(output.prompt_logprobs),
        tuple(
            (
                c.index,
                tuple(c.token_ids),
                c.text,
                _bits(c.logprobs),
                None if c.cumulative_logprob is None else c.cumulative_logprob.hex(),
                c.finish_reason,
                c.stop_reason,
            )
            for c in output.outputs
        ),
    )


def _bits(entries: Any) -> Any:
    """Logprob dicts with floats as hexadecimal, order kept."""
    if entries is None:
        return None
    return tuple(
        None
        if entry is None
        else tuple((t, p.logprob.hex(), p.rank, p.decoded_token) for t, p in entry.items())
        for entry in entries
    )


def run_together(llm: LLM) -> list[Signature]:
    """All requests in one batch."""
    asked = requests(llm.spec.vocab_size)
    outputs = llm.generate([list(p) for p, _ in asked], [s for _, s in asked], use_tqdm=False)
    return [signature(o) for o in outputs]


def run_one_by_one(llm: LLM) -> list[Signature]:
    """Each request alone, in order."""
    return [
        signature(llm.generate([prompt], params, use_tqdm=False)[0])
        for prompt, params in requests(llm.spec.vocab_size)
    ]
