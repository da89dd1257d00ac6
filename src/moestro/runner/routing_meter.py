"""How often the router as served chooses other experts than float64 maths on the same inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moestro import ops
from moestro.layers.moe import MoE, moe_layers
from moestro.models.causal_lm import CausalLM
from moestro.ops.attention import AttentionMetadata
from moestro.runner.kv_pool import KVPool

PAGE_SIZE = 64


@dataclass(slots=True)
class LayerFlips:
    """Tokens of one layer whose set of experts is another than float64's.

    terms: bf16 numbers a weight that serve, 0 for the fp32 weight. flipped: by the router as
    served. flipped_bf16_weights: with plain bf16 weights and fp32 logits. flipped_bf16_logits: as
    served, but with logits rounded to bf16.
    """

    layer: int
    terms: int
    num_tokens: int = 0
    flipped: int = 0
    flipped_bf16_weights: int = 0
    flipped_bf16_logits: int = 0

    def add(self, moe: MoE, x: torch.Tensor) -> None:
        """Count the rows of x [T, N], the layer's input."""
        exact = _exact_experts(moe, x)
        served = moe.router(x.dtype)
        rounded = ops.RouterWeights(moe.gate_weight.bfloat16().float())
        logits = ops.router_logits(x, served)
        self.num_tokens += len(x)
        self.flipped += _flips(moe.route(x), exact)
        self.flipped_bf16_weights += _flips(_gate(moe, ops.router_logits(x, rounded)), exact)
        self.flipped_bf16_logits += _flips(_gate(moe, logits.bfloat16().float()), exact)


def measure_routing(
    model: CausalLM, dtype: torch.dtype, token_ids: Sequence[int], window: int
) -> list[LayerFlips]:
    """Run the tokens in windows that don't see each other; one entry a MoE layer, in order."""
    layers = moe_layers(model)
    found = {n: LayerFlips(n, moe.router(dtype).terms) for n, moe in layers.items()}
    hooks = [
        moe.register_forward_pre_hook(lambda moe, args, entry=found[n]: entry.add(moe, args[0]))
        for n, moe in layers.items()
    ]
    pool = KVPool(model.spec, -(-window // PAGE_SIZE), PAGE_SIZE, dtype)
    try:
        with torch.inference_mode():
            for begin in range(0, len(token_ids), window):
                _prefill(model, pool, torch.tensor(token_ids[begin : begin + window]))
    finally:
        for hook in hooks:
            hook.remove()
        pool.close()
    return [entry for entry in found.values() if entry.num_tokens]


def _prefill(model: CausalLM, pool: KVPool, ids: torch.Tensor) -> None:
    count = len(ids)
    positions = torch.arange(count)
    attn = AttentionMetadata(
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        page_table=torch.arange(pool.num_pages, dtype=torch.int32)[None],
        slot_mapping=positions,
        max_query_len=count,
        max_seq_len=count,
    )
    model(ids, positions, pool.layers, attn)


def _exact_experts(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """[T, K] ids, ascending, by the fp32 weight in float64."""
    logits = x.double() @ moe.gate_weight.double().T
    sigmoid = moe.gating_rule.scoring == "sigmoid"
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    if moe.expert_bias is not None:
        scores = scores + moe.expert_bias.double()
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, : moe.gating_rule.top_k].sort(dim=-1).values


def _gate(moe: MoE, logits: torch.Tensor) -> ops.Routing:
    routing: ops.Routing = ops.moe_gating_top_k(logits, moe.expert_bias, moe.gating_rule)
    return routing


def _flips(routing: ops.Routing, exact: torch.Tensor) -> int:
    chosen = routing.topk_ids.long().sort(dim=-1).values
    return int((chosen != exact).any(dim=-1).sum())
