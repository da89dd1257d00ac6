"""The references against the same maths written again, directly, in float64.

Each check runs on all of the op's own cases, so what is shown here holds where bodies are compared.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moestro import ops
from moestro.ops.registry import Op
from moestro.ops.testing import Case, call, compare
from moestro.quant.format import WeightTensor
from moestro.quant.weight import expert, values

Direct = Callable[..., Any]
Tensor = torch.Tensor


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.double()
    return (rows / (rows.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple:
    summed = (x.double() + residual.double()).to(x.dtype)
    return _rms_norm(summed, weight, eps), summed


def _mtp_input(
    embeddings: Tensor,
    hidden_states: Tensor,
    positions: Tensor,
    embedding_weight: Tensor,
    hidden_weight: Tensor,
    eps: float,
) -> Tensor:
    rows, size = embeddings.shape
    out = torch.empty((rows, 2 * size), dtype=embeddings.dtype)
    for row in range(rows):
        embedding = embeddings[row] * (0 if int(positions[row]) == 0 else 1)
        out[row, :size] = _rms_norm(embedding, embedding_weight, eps)
        out[row, size:] = _rms_norm(hidden_states[row], hidden_weight, eps)
    return out


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _silu_and_mul(x: Tensor) -> Tensor:
    size = x.shape[-1] // 2
    return (_silu(x[..., :size].double()) * x[..., size:].double()).to(x.dtype)


def _linear(x: Tensor, weight: Tensor | WeightTensor, out_dtype: torch.dtype | None) -> Tensor:
    return _times(x, weight).to(out_dtype or x.dtype)


def _times(x: Tensor, weight: Tensor | WeightTensor) -> Tensor:
    """x [T, K] @ weight.T in float64."""
    if isinstance(weight, WeightTensor):
        if weight.format.name in ("w8a8", "w4a8"):
            x = _as_int8(x)
        weight = values(weight)
    return torch.einsum("tk,mk->tm", x.double(), weight.double())


def _as_int8(x: Tensor) -> Tensor:
    """The numbers that int8 codes of each row stand for, in float64."""
    rows = [torch.from_numpy(_row_as_int8(row.float().numpy())) for row in x]
    return torch.stack(rows) if rows else x.double()


def _row_as_int8(row: np.ndarray) -> np.ndarray:
    largest = np.abs(row).max()
    if largest == 0:
        return row.astype(np.float64)
    codes = np.rint(row * (np.float32(127) / largest)).astype(np.float64)
    return codes * np.float64(largest / np.float32(127))


def _embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    rows = [weight[int(i)] for i in input_ids]
    return torch.stack(rows) if rows else weight.new_empty((0, weight.shape[1]))


def _qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> tuple:
    tokens, dim = qkv.shape[0], q_weight.shape[0]
    parts = qkv.double().split((num_heads * dim, num_kv_heads * dim, num_kv_heads * dim), dim=1)
    rotary = cos_sin.shape[1]
    half = rotary // 2
    # Each pair (i, i + R / 2) is a complex number; rotation is a multiplication.
    turn = torch.complex(*cos_sin.double().split(half, dim=1))[:, None]
    out = []
    for part, weight in zip(parts, (q_weight, k_weight, None), strict=True):
        heads = part.reshape(tokens, part.shape[1] // dim, dim)
        if weight is not None:
            heads = heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * weight
            turned = torch.complex(heads[..., :half], heads[..., half:rotary]) * turn
            heads = torch.cat((turned.real, turned.imag, heads[..., rotary:]), dim=-1)
        out.append(heads.to(qkv.dtype))
    return tuple(out)


def _store_kv(k: Tensor, v: Tensor, pages: ops.KVPages, slot_mapping: Tensor) -> None:
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for head in range(k.shape[1]):
                place = (slot // pages.page_size, head, slot % pages.page_size)
                _keep(k[t, head], pages.k, pages.k_scales, place)
                _keep(v[t, head], pages.v, pages.v_scales, place)


def _keep(row: Tensor, held: Tensor, scales: Tensor | None, place: tuple[int, int, int]) -> None:
    """One row of keys or values; the largest number becomes the largest code."""
    if scales is None:
        held[place] = row
        return
    numbers = [float(x) for x in row.float()]
    largest = 127.0 if held.dtype == torch.int8 else 448.0
    top = max(map(abs, numbers)) if all(map(math.isfinite, numbers)) else math.nan
    scale = torch.tensor(top) / largest
    if top < 127 / 2.0**128:  # 127 / top is no fp32 number
        scale = torch.tensor(0.0)
    codes = torch.zeros(len(numbers))
    if float(scale) > 0:
        exact, inverse = torch.tensor(numbers), torch.tensor(largest).div(torch.tensor(top))
        scaled = exact * inverse if largest == 127 else exact / scale
        codes = scaled.clamp(-largest, largest)
    if largest == 127:
        codes = codes.round()
    bits = codes.to(held.dtype).view(torch.uint8)
    held.view(torch.uint8)[place] = bits
    scales[place] = scale


def _qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: ops.Rotary,
    eps: float,
    pages: ops.KVPages,
    slot_mapping: Tensor,
) -> Tensor:
    dim, kv_heads = pages.head_dim, pages.num_kv_heads
    rows = torch.stack([rotary.table[int(p)] for p in rotary.positions] or [rotary.table[0]])
    heads = qkv.shape[1] // dim - 2 * kv_heads
    rows = rows[: len(qkv)]
    q, k, v = _qk_norm_rope(qkv, q_weight, k_weight, rows, eps, heads, kv_heads)
    if pages.hadamard:
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while len(matrix) < dim:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        q, k = (((t.double() @ matrix) * dim**-0.5).to(t.dtype) for t in (q, k))
    _store_kv(k, v, pages, slot_mapping)
    return q


def _paged_attention(
    q: Tensor, pages: ops.KVPages, metadata: ops.AttentionMetadata, scale: float
) -> Tensor:
    out = torch.full_like(q, torch.nan)
    group = q.shape[1] // pages.k.shape[1]
    size = pages.page_size
    for s, length in enumerate(metadata.seq_lens.tolist()):
        start, end = metadata.query_start_loc[s : s + 2].tolist()
        for t in range(start, end):
            last = length - (end - t)  # the query's own position
            place = [(int(metadata.page_table[s, p // size]), p % size) for p in range(last + 1)]
            page, slot = (torch.tensor(x) for x in zip(*place, strict=True))
            for h in range(q.shape[1]):
                keys, values = (t[:, h // group].double() for t in _rows(pages, page, slot))
                weights = torch.exp((scores := keys @ q[t, h].double() * scale) - scores.max())
                out[t, h] = (weights / weights.sum() @ values).to(q.dtype)
    return out


def _rows(pages: ops.KVPages, page: Tensor, slot: Tensor) -> list[Tensor]:
    """Keys and values at some places: [places, G, D] each."""
    out = []
    for codes, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
        rows = codes.float()[page, :, slot]
        out.append(rows if scales is None else rows * scales[page, :, slot][..., None])
    return out


def _moe_gating_top_k(
    router_logits: Tensor, expert_bias: Tensor | None, rule: ops.GatingRule
) -> ops.Routing:
    experts = router_logits.shape[1]
    bias = [0.0] * experts if expert_bias is None else expert_bias.tolist()
    ids, weights = [], []
    for row in router_logits.double().tolist():
        if rule.scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-x)) for x in row]
        else:
            scores = [math.exp(x - max(row)) for x in row]
            scores = [x / sum(scores) for x in scores]
        best = sorted(range(experts), key=lambda e: (-(scores[e] + bias[e]), e))[: rule.top_k]
        total = sum(scores[e] for e in best) + rule.epsilon if rule.renormalize else 1.0
        ids.append(best)
        weights.append([scores[e] / total * rule.scaling for e in best])
    shape = (len(ids), rule.top_k)
    return ops.Routing(
        torch.tensor(ids, dtype=torch.int32).view(shape), torch.tensor(weights).view(shape)
    )


def _router_logits(x: Tensor, router: ops.RouterWeights) -> Tensor:
    return _exact_router_logits(x, router).float()


def _exact_router_logits(x: Tensor, router: ops.RouterWeights) -> Tensor:
    weight = router.weight.double()
    if router.terms:
        high = weight.bfloat16().double()
        rest = ((weight - high) * 256).bfloat16().double() / 256
        weight = high if router.terms == 1 else high + rest
    return x.double() @ weight.T


def _moe_router(
    x: Tensor, router: ops.RouterWeights, rule: ops.GatingRule, expert_counts: Tensor | None = None
) -> ops.Routing:
    routing = _moe_gating_top_k(
        _exact_router_logits(x, router),
        router.expert_bias,
        rule,
    )
    if expert_counts is not None:
        for expert in routing.topk_ids.flatten().tolist():
            expert_counts[expert] += 1
    return routing


def _moe_experts(
    x: Tensor, routing: ops.Routing, experts: ops.ExpertWeights, fp32_combine: bool
) -> Tensor:
    out = torch.empty_like(x)
    for t, row in enumerate(x):
        routed = torch.zeros_like(row, dtype=torch.float64)
        for chosen, weight in zip(routing.topk_ids[t], routing.topk_weights[t], strict=True):
            gate_up, down = (_one(w, chosen) for w in (experts.gate_up_proj, experts.down_proj))
            routed += weight.double() * _expert(row, gate_up, down)
        shared = torch.zeros_like(routed)
        if experts.shared_gate_up_proj is not None:
            gate_up, down = experts.shared_gate_up_proj, experts.shared_down_proj
            shared = _expert(row, gate_up, down)
            if not fp32_combine:
                routed, shared = routed.to(x.dtype).double(), shared.to(x.dtype).double()
        out[t] = routed + shared
    return out


def _one(weight: Tensor | WeightTensor, index: Tensor) -> Tensor | WeightTensor:
    return expert(weight, int(index)) if isinstance(weight, WeightTensor) else weight[index]


def _expert(row: Tensor, gate_up: Tensor | WeightTensor, down: Tensor | WeightTensor) -> Tensor:
    gate, up = _times(row[None], gate_up).chunk(2, dim=1)
    return _times((_silu(gate) * up).to(row.dtype), down)[0]


DIRECT: dict[Op, Direct] = {
    ops.rms_norm: _rms_norm,
    ops.add_rms_norm: _add_rms_norm,
    ops.mtp_input: _mtp_input,
    ops.silu_and_mul: _silu_and_mul,
    ops.linear: _linear,
    ops.embedding: _embedding,
    ops.qk_norm_rope: _qk_norm_rope,
    ops.qk_norm_rope_store: _qk_norm_rope_store,
    ops.store_kv: _store_kv,
    ops.paged_attention: _paged_attention,
    ops.moe_gating_top_k: _moe_gating_top_k,
    ops.router_logits: _router_logits,
    ops.moe_router: _moe_router,
    ops.moe_experts: _moe_experts,
}
CASES = [(op, case) for op in DIRECT for case in op.cases()]


def test_the_rest_is_checked_elsewhere() -> None:
    others = {op.name for op in ops.all_ops()} - {op.name for op in DIRECT}
    assert others == {"attention_plan", "sample", "sample_tokens", "token_logprobs"}


@pytest.mark.parametrize(("op", "case"), CASES, ids=lambda x: x.name)
def test_reference_equals_float64(op: Op, case: Case) -> None:
    arguments = case.draw()
    expected, actual = call(DIRECT[op], arguments), call(op.reference, arguments)
    compare(actual.returned, expected.returned, case.dtype, op)
    for name in op.mutates:
        compare(actual.arguments[name], expected.arguments[name], case.dtype, op)


def test_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    rule = ops.GatingRule(2, "sigmoid", renormalize=False, epsilon=0.0, scaling=1.0)
    routing = ops.moe_gating_top_k.reference(logits, bias, rule)
    assert routing.topk_ids.tolist() == [[3, 0]]
    torch.testing.assert_close(routing.topk_weights, torch.sigmoid(logits)[:, [3, 0]])


def test_scaling_is_on_the_routed_part_only() -> None:
    case = next(c for c in ops.moe_experts.cases() if "8, 48" in c.name)
    arguments = case.draw()
    experts: ops.ExpertWeights = arguments["experts"]
    routing: ops.Routing = arguments["routing"]
    alone = ops.ExpertWeights(experts.gate_up_proj, experts.down_proj)
    scaled = ops.Routing(routing.topk_ids, routing.topk_weights * 2.826)
    x, run = arguments["x"], ops.moe_experts.reference
    shared = run(x, routing, experts, False) - run(x, routing, alone, False)
    torch.testing.assert_close(
        run(x, scaled, experts, False), 2.826 * run(x, routing, alone, False) + shared
    )


def test_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros((2, 7))
    rule = ops.GatingRule(3, "softmax", renormalize=True, epsilon=0.0, scaling=1.0)
    routing = ops.moe_gating_top_k.reference(logits, None, rule)
    assert routing.topk_ids.tolist() == [[0, 1, 2]] * 2
