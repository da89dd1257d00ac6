"""A model with drawn weights and the smallest loop around it: no scheduler, no sampler."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from tests.fakes.parameters import tensors_of
from tests.oracle.weights import draw_tensor

import moestro.backends.cpu  # noqa: F401 -- registers the bodies
from moestro import ops
from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec
from moestro.layers.parameters import Parameters
from moestro.models.causal_lm import CausalLM
from moestro.models.registry import build_model
from moestro.quant.kv import LARGEST_CODE
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model

_FUSED = {
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
}


def drawn_model(spec: ModelSpec, seed: int, dtype: torch.dtype) -> CausalLM:
    """The model of `spec` (its MTP layers included) with the weights of tests.oracle.weights."""
    model = build_model(spec, Parameters(dtype))
    for name, parameter in tensors_of(model.weights).items():
        parameter.copy_(torch.from_numpy(_draw(name, parameter, spec, seed)))
    return model


def tiny_hy3(dtype: torch.dtype = torch.float32) -> CausalLM:
    """The model that ships, loaded."""
    folder = resolve_model("tiny-hy3")
    model = build_model(load_model_spec(folder), Parameters(dtype))
    load_weights(model.spec, model.weights, folder)
    return model


def _draw(
    name: str, parameter: torch.Tensor, spec: ModelSpec, seed: int
) -> npt.NDArray[np.float32]:
    """The tensor under HF's names, joined where ours holds several of them."""
    name = name.replace("mlp.expert_bias", "mlp.e_score_correction_bias")
    for ours, theirs in _FUSED.items():
        if name.endswith(ours):
            q, kv = spec.num_attention_heads, spec.num_key_value_heads
            shares = (q, kv, kv) if len(theirs) == 3 else (1, 1)
            rows = [parameter.shape[0] * s // sum(shares) for s in shares]
            parts = zip(theirs, rows, strict=True)
            stem = name.removesuffix(ours)
            drawn = [draw_tensor(stem + t, (n, parameter.shape[1]), seed) for t, n in parts]
            return np.concatenate(drawn)
    return draw_tensor(name, tuple(parameter.shape), seed)


def _empty_pages(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, hadamard: bool
) -> ops.KVPages:
    """Keys that would show if they were read before they are stored."""
    if dtype in LARGEST_CODE:
        codes = torch.zeros(2, *shape).to(dtype)
        k_scales, v_scales = torch.full((2, *shape[:3]), torch.nan)
        return ops.KVPages(codes[0], codes[1], k_scales, v_scales, hadamard)
    k, v = torch.full(shape, torch.nan, dtype=dtype), torch.zeros(shape, dtype=dtype)
    return ops.KVPages(k, v, hadamard=hadamard)


class PagedLoop:
    """Runs token runs of several sequences through a model, with page ids in a shuffled order."""

    def __init__(
        self,
        model: CausalLM,
        num_sequences: int,
        max_len: int,
        page_size: int = 16,
        kv_dtype: torch.dtype | None = None,
        *,
        hadamard: bool = False,
    ) -> None:
        """kv_dtype, hadamard: of the pages; the default is the model's type."""
        spec = model.spec
        self.model = model
        self.page_size = page_size
        pages_each = -(-max_len // page_size)
        num_pages = num_sequences * pages_each
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self.page_table = order.view(num_sequences, pages_each).int()
        self.lengths = [0] * num_sequences
        shape = (num_pages, spec.num_key_value_heads, page_size, spec.head_dim)
        dtype = kv_dtype or model.model.embed_tokens.weight.dtype
        self.kv_pages = [
            _empty_pages(shape, dtype, hadamard=hadamard)
            for _ in range(spec.num_hidden_layers + model.num_mtp_layers)
        ]

    def metadata(
        self, starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, ops.AttentionMetadata]:
        """(positions, metadata) of a step that computes counts[s] tokens from starts[s]."""
        runs = list(zip(starts, counts, strict=True))
        positions = torch.cat([torch.arange(a, a + n) for a, n in runs])
        owner = torch.repeat_interleave(torch.tensor(counts))
        pages = self.page_table[owner, positions // self.page_size].long()
        lengths = [a + n for a, n in runs]
        attn = ops.AttentionMetadata(
            query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            page_table=self.page_table,
            slot_mapping=pages * self.page_size + positions % self.page_size,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
        )
        return positions, attn

    def step(self, runs: Sequence[Iterable[int]]) -> torch.Tensor:
        """Append runs[s] to sequence s; hidden states [T, N] of all new tokens."""
        token_lists = [[int(t) for t in run] for run in runs]
        counts = [len(t) for t in token_lists]
        positions, attn = self.metadata(self.lengths, counts)
        ids = torch.tensor([t for tokens in token_lists for t in tokens])
        self.lengths = [a + n for a, n in zip(self.lengths, counts, strict=True)]
        with torch.inference_mode():
            hidden: torch.Tensor = self.model(ids, positions, self.kv_pages, attn)
        return hidden


def prompt_logits(
    model: CausalLM, prompts: Sequence[Iterable[int]], page_size: int = 16
) -> npt.NDArray[np.float32]:
    """fp32 logits at every position of all prompts, computed as one batch."""
    lists = [list(p) for p in prompts]
    loop = PagedLoop(model, len(lists), max(map(len, lists)), page_size)
    logits: npt.NDArray[np.float32] = model.compute_logits(loop.step(lists)).numpy()
    return logits


def greedy_tokens(model: CausalLM, prompt: Iterable[int], count: int) -> list[int]:
    """Greedy continuation, one decode step a token."""
    run = list(prompt)
    loop = PagedLoop(model, 1, len(run) + count)
    out: list[int] = []
    while len(out) < count:
        logits = model.compute_logits(loop.step([run])[-1:])
        run = [int(logits.argmax())]
        out += run
    return out
