"""Products: linear layers, the router, the fused MoE block."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from moestro import ops
from moestro.cli.bench.bound import row_bytes
from moestro.cli.bench.works.work import (
    COLD_BYTES,
    Call,
    Work,
    normal,
    packed,
    unit_of,
)

STORAGE = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model: attention heads of 128, experts, and rows of its output layer."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    inner: int
    vocab: int


SHAPES = {
    "hy3": Shape("hy3", 4096, 64, 8, 192, 8, 1536, 120832),
    "qwen3": Shape("qwen3", 2048, 32, 4, 128, 8, 768, 151936),
    "bench": Shape("bench", 1024, 16, 4, 64, 8, 384, 32768),
}
TOKENS = (1, 8, 64, 512, 4096)


def linears(shapes: list[str], formats: list[str]) -> Iterator[Work]:
    """qkv_proj and o_proj of each model, and the output layer of the bench model."""
    for name in shapes:
        shape = SHAPES[name]
        qkv = (shape.heads + 2 * shape.kv_heads) * 128
        sizes: list[tuple[int, int, tuple[int, ...]]] = [
            (qkv, shape.hidden, TOKENS),
            (shape.hidden, shape.heads * 128, TOKENS),
        ]
        if name == "bench":
            sizes.append((shape.vocab, shape.hidden, (1, 8, 32)))
        for rows, width, tokens in sizes:
            for weights in formats:
                yield from _linear(rows, width, weights, tokens)


def _linear(rows: int, width: int, weights: str, counts: tuple[int, ...]) -> Iterator[Work]:
    """One weight, for each number of tokens."""
    size = rows * row_bytes(STORAGE.get(weights, "w8a8" if weights == "fp8" else weights), width)
    copies = max(2, int(COLD_BYTES // size))
    plain = [normal(rows, width, scale=width**-0.5) for _ in range(copies)]
    ours = [packed(w, weights) for w in plain]
    for tokens in counts:
        x = normal(tokens, width)
        if weights == "fp32":
            x = x.float()
        yield Work(
            "linear",
            f"{weights} {tokens} x {width} -> {rows}",
            lambda i, x=x: ops.linear(x, ours[i % copies]),  # type: ignore[misc]
            _torch_linears(x, plain, weights),
            size,
            2.0 * tokens * rows * width,
            unit_of(weights),
        )


def _torch_linears(x: torch.Tensor, plain: list[torch.Tensor], weights: str) -> dict[str, Call]:
    """torch's own products of the same width of weights; activations quantised beforehand."""
    copies = len(plain)
    if weights in ("bf16", "fp8"):
        return {"F.linear bf16": lambda i: F.linear(x, plain[i % copies])}
    if weights == "fp32":
        wide = [w.float() for w in plain]
        return {"F.linear fp32": lambda i: F.linear(x, wide[i % copies])}
    if weights == "w8a8":
        codes = [w.float().mul(500).clamp(-127, 127).to(torch.int8) for w in plain]
        scales = torch.ones(len(plain[0]), dtype=torch.bfloat16)
        xq = x.float().mul(30).clamp(-127, 127).to(torch.int8)
        calls: dict[str, Call] = {
            "_int_mm": lambda i: torch._int_mm(xq, codes[i % copies].T),
            "_weight_int8pack_mm": lambda i: torch._weight_int8pack_mm(
                x, codes[i % copies], scales
            ),
        }
        return calls
    nibbles = [
        torch._convert_weight_to_int4pack_for_cpu(
            torch.randint(0, 16, w.shape, dtype=torch.int32), 1
        )
        for w in plain
    ]
    groups = torch.ones(plain[0].shape[1] // 32, len(plain[0]), 2, dtype=torch.bfloat16)
    return {
        "_weight_int4pack_mm": lambda i: torch._weight_int4pack_mm_for_cpu(
            x, nibbles[i % copies], 32, groups
        )
    }


def routers() -> Iterator[Work]:
    """The router of Hy3, its logits alone: two bf16 numbers a weight, beside an fp32 product."""
    rows, width, copies = 192, 4096, 24
    weights = [torch.randn(rows, width) * 0.02 for _ in range(copies)]
    ours = [_packed_router(w) for w in weights]
    for tokens in (1, 2, 8, 32, 128, 512, 4096):
        x = normal(tokens, width)
        yield Work(
            "router",
            f"{tokens} x {width} -> {rows}",
            lambda i, x=x: ops.router_logits(x, ours[i % copies]),  # type: ignore[misc]
            _fp32_products(x, weights),
            4.0 * rows * width,
            4.0 * tokens * rows * width,
        )


def _fp32_products(x: torch.Tensor, weights: list[torch.Tensor]) -> dict[str, Call]:
    """With activations that are fp32 already, and with the cast that a bf16 model needs."""
    wide, copies = x.float(), len(weights)
    return {
        "F.linear fp32": lambda i: F.linear(wide, weights[i % copies]),
        "cast, F.linear fp32": lambda i: F.linear(x.float(), weights[i % copies]),
    }


def _packed_router(weight: torch.Tensor) -> Any:
    from moestro.backends import load_backend

    plain = ops.RouterWeights.of(weight, None, torch.bfloat16)
    return load_backend("cpu").pack_router(plain)


@cache
def popularity() -> tuple[float, ...]:
    """How often tiny-hy3 chooses each expert of each layer on a text, over the layer's mean."""
    from moestro.cli.bench.resident import build
    from moestro.core.sampling_params import SamplingParams

    engine = {"skip_tokenizer_init": False, "max_model_len": 2048}
    built = build("tiny-hy3", torch.get_num_threads(), engine)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    totals: dict[int, list[int]] = {}
    turn = 0
    while not totals:  # the engine reports its counts every few thousand tokens
        turn += 1
        prompt = built.processor.process(TEXT, params, request_id=str(turn))
        built.engine.add_request(prompt)
        while built.engine.has_work():
            report = built.engine.step()
            if report.expert_tokens is not None:
                totals |= {layer: list(counts) for layer, counts in report.expert_tokens.rows()}
    built.engine.close()
    return tuple(
        len(counts) * n / sum(counts) for counts in totals.values() if sum(counts) for n in counts
    )


TEXT = (
    "The history of the lighthouse begins long before the first tower was built. Sailors lit "
    "fires on hills, and the smoke by day told them how far the harbour was. When the towns grew "
    "rich from trade, they built walls of stone around the flame, and a keeper lived beside it "
    "through the winter. He counted the ships, wrote down the weather, and slept when the sun came "
    "up. In later years a lens of glass gathered the light of one small lamp and threw it across "
    "twenty miles of water. The keeper's children learned to read by that lamp. Today nobody "
    "climbs the stairs at night; a motor turns the lens, and the keeper's house is a museum."
)


def draw_routing(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """topk_ids [T, K] int32: distinct experts, chosen as often as tiny-hy3 chooses its own.

    Expert e of a larger model takes the popularity of expert e mod the number of tiny-hy3's.
    """
    shares = torch.tensor(popularity())
    weight = shares[torch.arange(experts) % len(shares)].clamp(min=0.02).log()
    generator = torch.Generator().manual_seed(seed)
    noise = -torch.rand(tokens, experts, generator=generator).log()
    return (weight - noise.log()).topk(top_k, dim=-1).indices.int()


@dataclass(frozen=True, slots=True)
class Slice:
    """What one rank of a parallel layout holds of a model's experts.

    local: experts held, of `experts`. A layout with all experts gets each token once, with its
    top_k choices; one with a part of them gets a row for each (token, choice) that is its own.
    """

    name: str
    hidden: int
    experts: int
    local: int
    inner: int
    top_k: int = 8


SLICES = {
    "hy3": (
        Slice("hy3 TP8/EP1", 4096, 192, 192, 192),
        Slice("hy3 TP1/EP8", 4096, 192, 24, 1536),
    ),
    "qwen3": (Slice("qwen3", 2048, 128, 128, 768),),
    "bench": (Slice("bench", 1024, 64, 64, 384),),
}


def experts(shapes: list[str], formats: list[str]) -> Iterator[Work]:
    """The fused block from hidden states and routing to the combined output."""
    for name in shapes:
        for part in SLICES[name]:
            for weights in formats:
                yield from _experts(part, weights)


def _experts(part: Slice, weights: str) -> Iterator[Work]:
    wide = 2 * part.inner
    plain = ops.ExpertWeights(
        normal(part.local, wide, part.hidden, scale=0.02),
        normal(part.local, part.hidden, part.inner, scale=0.02),
    )
    ours = ops.ExpertWeights(
        packed(plain.gate_up_proj, weights, paired=True),  # type: ignore[arg-type]
        packed(plain.down_proj, weights),  # type: ignore[arg-type]
    )
    storage = STORAGE.get(weights, weights)
    size = wide * row_bytes(storage, part.hidden) + part.hidden * row_bytes(storage, part.inner)
    for tokens in (1, 4, 16, 64, 256, 1024, 4096):
        drawn = [_routing(part, tokens, seed) for seed in range(8)]
        drawn = [d for d in drawn if len(d.topk_ids)]
        inputs = [normal(len(d.topk_ids), part.hidden) for d in drawn]
        used = sum(d.topk_ids.unique().numel() for d in drawn) / len(drawn)
        rows = sum(d.topk_ids.numel() for d in drawn) / len(drawn)
        yield Work(
            "moe",
            f"{part.name} {weights} {tokens} tokens",
            _ours(inputs, drawn, ours),
            {"F.linear bf16 an expert": _loop(inputs, drawn, plain)},
            used * size,
            2.0 * rows * 3 * part.hidden * part.inner,
            unit_of(weights),
        )


def _routing(part: Slice, tokens: int, seed: int) -> ops.Routing:
    ids = draw_routing(tokens, part.experts, part.top_k, seed)
    if part.local < part.experts:
        ids = ids[ids < part.local][:, None].contiguous()
    return ops.Routing(ids, torch.full(ids.shape, 1 / part.top_k))


def _ours(xs: list[torch.Tensor], drawn: list[ops.Routing], weights: ops.ExpertWeights) -> Call:
    return lambda i: ops.moe_experts(xs[i % len(xs)], drawn[i % len(xs)], weights, False)


def _loop(xs: list[torch.Tensor], drawn: list[ops.Routing], weights: ops.ExpertWeights) -> Call:
    return lambda i: torch_experts(xs[i % len(xs)], drawn[i % len(xs)], weights)


def torch_experts(x: torch.Tensor, routing: ops.Routing, w: ops.ExpertWeights) -> torch.Tensor:
    """One F.linear an expert that has tokens, as eager implementations do."""
    assert isinstance(w.gate_up_proj, torch.Tensor)
    assert isinstance(w.down_proj, torch.Tensor)
    out = torch.zeros_like(x)
    for expert in routing.topk_ids.unique().tolist():
        token, choice = (routing.topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w.gate_up_proj[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w.down_proj[expert])
        y = y * routing.topk_weights[token, choice, None].to(y.dtype)
        out.index_add_(0, token, y)
    return out
