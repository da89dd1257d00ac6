"""From logits to tokens on Hy3's vocabulary, beside the same filters written in torch."""

from collections.abc import Iterator

import torch

from moestro import ops
from moestro.cli.bench.works.work import Work

ROWS, VOCAB = 32, 120832
SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
}
"""temperature, top_k, top_p, min_p"""


def sampler() -> Iterator[Work]:
    """Each setting on all rows. The bound is one read of the logits."""
    logits = torch.randn(ROWS, VOCAB) * 3
    for name, (temperature, top_k, top_p, min_p) in SETTINGS.items():
        metadata = ops.SamplingMetadata(
            torch.full((ROWS,), temperature, dtype=torch.float64),
            torch.full((ROWS,), top_k),
            torch.full((ROWS,), top_p, dtype=torch.float64),
            torch.full((ROWS,), min_p, dtype=torch.float64),
            torch.arange(ROWS),
            torch.zeros(ROWS, dtype=torch.int64),
            torch.full((ROWS,), 100),
        )
        batch = ops.SamplingBatch(metadata)
        yield Work(
            "sampler",
            f"{name}, [{ROWS}, {VOCAB}]",
            lambda _, b=batch: ops.sample(logits, b),  # type: ignore[misc]
            {
                "torch": lambda _, s=SETTINGS[name]: torch_sample(logits, *s),  # type: ignore[misc]
            },
            4.0 * ROWS * VOCAB,
            0.0,
            "fp32",
        )


def torch_sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """As vLLM's torch sampler does it: a sort where top-k or top-p asks for one, then Gumbel."""
    if temperature == 0:
        return logits.argmax(-1)
    scaled = logits / temperature
    if min_p:
        probabilities = scaled.softmax(-1)
        scaled.masked_fill_(
            probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf
        )
    if top_k or top_p < 1:
        ordered, index = scaled.sort(-1, descending=False)
        if top_k:
            least = ordered[:, -top_k, None]
            ordered.masked_fill_(ordered < least, -torch.inf)
        if top_p < 1:
            mass = ordered.softmax(-1).cumsum(-1)
            dropped = mass <= 1 - top_p
            dropped[:, -1] = False
            ordered.masked_fill_(dropped, -torch.inf)
        scaled = ordered.scatter(-1, index, ordered)
    noise = torch.empty_like(scaled).exponential_()
    return scaled.softmax(-1).div_(noise).argmax(-1)
