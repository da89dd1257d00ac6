"""A sampler of torch's operators, the ones that vLLM's v1 sampler uses without a GPU kernel.

Same order and same operators: counts by scatter_add, penalties on whole rows, top_k by topk alone
and otherwise both limits by one sort, softmax, and argmax(probabilities / exponential noise).
Token ids of the history are handed over as tensors, the grammar's mask as booleans.
"""

from typing import Any

import torch
from sampler_cases import SamplingCase, history_of, mask_of


class TorchSampler:
    def __init__(self, case: SamplingCase, rows: int, vocab: int) -> None:
        self.case, self.vocab = case, vocab
        self.temperature = torch.full((rows, 1), case.temperature)
        self.top_k = torch.full((rows,), case.top_k or vocab)
        self.top_p = torch.full((rows,), case.top_p)
        self.forbidden = ~mask_of(rows, vocab) if case.masked else None
        history = history_of(case, rows, vocab)
        self.prompt, self.output = history.chunk(2, 1) if case.history else (None, None)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> Any:
        """Token ids, and log probabilities where asked for. logits are overwritten."""
        case = self.case
        raw = logits.log_softmax(-1) if case.logprobs >= 0 else None
        if self.forbidden is not None:
            logits.masked_fill_(self.forbidden, float("-inf"))
        if case.has_penalties:
            self.penalise(logits)
        if case.temperature == 0:
            token_ids = logits.argmax(-1)
        else:
            logits.div_(self.temperature)
            if case.min_p:
                probabilities = logits.softmax(-1)
                least = case.min_p * probabilities.amax(-1, keepdim=True)
                logits.masked_fill_(probabilities < least, float("-inf"))
            logits = self.limit(logits)
            probabilities = logits.softmax(-1)
            noise = torch.empty_like(probabilities).exponential_()
            token_ids = probabilities.div_(noise).argmax(-1)
        if raw is None:
            return token_ids, None
        top = raw.topk(case.logprobs, -1)
        own = raw.gather(-1, token_ids[:, None])
        return token_ids, (top, own, (raw >= own).sum(-1))

    def penalise(self, logits: torch.Tensor) -> None:
        case = self.case
        _, in_prompt = self.counts(self.prompt)
        counts, in_output = self.counts(self.output)
        penalties = torch.where(in_prompt | in_output, case.repetition, 1.0)
        logits *= torch.where(logits > 0, 1.0 / penalties, penalties)
        logits -= case.frequency * counts
        logits -= case.presence * in_output

    def counts(self, token_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.zeros((len(token_ids), self.vocab + 1), dtype=torch.long)
        counts.scatter_add_(1, token_ids, torch.ones_like(token_ids))
        counts = counts[:, : self.vocab]
        return counts, counts > 0

    def limit(self, logits: torch.Tensor) -> torch.Tensor:
        case = self.case
        if not case.top_k and case.top_p == 1.0:
            return logits
        if case.top_p == 1.0:
            least = logits.topk(case.top_k, -1).values[:, -1:]
            return logits.masked_fill_(logits < least, float("-inf"))
        ranked, ids = logits.sort(-1, descending=False)
        if case.top_k:
            least = ranked.gather(1, (ranked.shape[1] - self.top_k)[:, None])
            ranked.masked_fill_(ranked < least, float("-inf"))
        sums = ranked.softmax(-1).cumsum(-1)
        beyond = sums <= 1 - self.top_p[:, None]
        beyond[:, -1] = False
        ranked.masked_fill_(beyond, float("-inf"))
        return logits.scatter_(-1, ids, ranked)
