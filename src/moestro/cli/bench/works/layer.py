"""One MoE layer of Hy3's real size, composed of ops as the model's layer is: no peer, its bound."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moestro import ops
from moestro.backends import load_backend
from moestro.cli.bench.bound import Storage, experts_used, row_bytes
from moestro.cli.bench.works.attention import DIM, Batch, make_batch
from moestro.cli.bench.works.matmul import SHAPES, STORAGE
from moestro.cli.bench.works.work import Call, Work, normal, packed, unit_of
from moestro.quant.format import WeightTensor

HY3 = SHAPES["hy3"]
STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "decode 1 at 1K": ((1, 1024),),
    "decode 8 at 1K": ((1, 1024),) * 8,
    "decode 32 at 1K": ((1, 1024),) * 32,
    "prefill 512": ((512, 512),),
    "prefill 2048": ((2048, 2048),),
}
RULE = ops.GatingRule(8, "sigmoid", True, 1e-20, 2.826)
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of the layer; every expert holds the values of one."""

    qkv: WeightTensor
    o: WeightTensor
    router: ops.RouterWeights
    experts: ops.ExpertWeights
    norm: torch.Tensor
    head_norm: torch.Tensor

    def __call__(self, x: torch.Tensor, batch: Batch, rotary: ops.Rotary) -> torch.Tensor:
        """[T, N] to [T, N]; stores keys and values as it goes."""
        y, stream = ops.add_rms_norm(x, x, self.norm, EPS)
        qkv, heads = ops.linear(y, self.qkv), self.head_norm
        slots = batch.metadata.slot_mapping
        q = ops.qk_norm_rope_store(qkv, heads, heads, rotary, EPS, batch.pages, slots)
        y = ops.paged_attention(q, batch.pages, batch.metadata, DIM**-0.5)
        y, stream = ops.add_rms_norm(ops.linear(y.flatten(1), self.o), stream, self.norm, EPS)
        routing = ops.moe_router(y, self.router, RULE)
        out: torch.Tensor = ops.moe_experts(y, routing, self.experts, True)
        return out


def layers(formats: list[str]) -> Iterator[Work]:
    """Decode and prefill steps of the layer in each format."""
    for weights in formats:
        layer = make_layer(weights)
        for title, sequences in STEPS.items():
            yield _step(layer, weights, title, sequences)


def make_layer(weights: str) -> Layer:
    """Random weights of one format."""
    qkv_rows, heads = (HY3.heads + 2 * HY3.kv_heads) * DIM, HY3.heads * DIM
    router = ops.RouterWeights.of(
        torch.randn(HY3.experts, HY3.hidden) * 0.02, torch.zeros(HY3.experts), torch.bfloat16
    )
    gate_up = normal(2 * HY3.inner, HY3.hidden, scale=0.02)
    down = normal(HY3.hidden, HY3.inner, scale=0.02)
    ones = torch.ones(HY3.hidden, dtype=torch.bfloat16)
    return Layer(
        packed(normal(qkv_rows, HY3.hidden, scale=0.02), weights),
        packed(normal(HY3.hidden, heads, scale=0.02), weights),
        load_backend("cpu").pack_router(router),
        ops.ExpertWeights(
            _repeated(packed(gate_up[None], weights, paired=True)),
            _repeated(packed(down[None], weights)),
            packed(gate_up, weights, paired=True),
            packed(down, weights),
        ),
        ones,
        ones[:DIM],
    )


def _repeated(one: WeightTensor) -> WeightTensor:
    """The only expert of a stack as Hy3's 192, each in memory of its own."""
    count = HY3.experts
    shape = (count, *one.shape[1:])
    if one.packed:
        return replace(one, shape=shape, codes=one.codes.repeat(count))
    codes, scales, zeros = (
        None if t is None else t.repeat(count, 1, 1) for t in (one.codes, one.scales, one.zeros)
    )
    assert codes is not None
    return replace(one, shape=shape, codes=codes, scales=scales, zeros=zeros)


def _step(layer: Layer, weights: str, title: str, sequences: tuple[tuple[int, int], ...]) -> Work:
    batch = make_batch(HY3, sequences)
    tokens = len(batch.q)
    x = normal(tokens, HY3.hidden)
    angles = torch.rand(tokens, DIM // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    rotary = ops.Rotary(table, torch.arange(tokens))
    storage = STORAGE.get(weights, "w8a8" if weights == "fp8" else weights)
    seen = sum(q * (n - q) + q * (q + 1) // 2 for q, n in sequences)
    return Work(
        "layer",
        f"hy3 layer {weights}, {title}",
        _call(layer, x, batch, rotary),
        {},
        _read_bytes(Storage(storage, storage), tokens) + 2.0 * batch.pages.k.nbytes,
        _operations(tokens) + 4.0 * seen * HY3.heads * DIM,
        unit_of(weights),
    )


def _call(layer: Layer, x: torch.Tensor, batch: Batch, rotary: ops.Rotary) -> Call:
    return lambda _: layer(x, batch, rotary)


def _read_bytes(storage: Storage, tokens: int) -> float:
    width, rows = HY3.hidden, (HY3.heads + 2 * HY3.kv_heads) * DIM
    dense = rows * row_bytes(storage.layers, width) + width * row_bytes(
        storage.layers, HY3.heads * DIM
    )
    one = 2 * HY3.inner * row_bytes(storage.layers, width) + width * row_bytes(
        storage.layers, HY3.inner
    )
    used = experts_used(HY3.experts, HY3.top_k, tokens) + 1
    return dense + used * one + HY3.experts * width * 4.0


def _operations(tokens: int) -> float:
    heads = 2 * HY3.heads + 2 * HY3.kv_heads
    dense = heads * DIM * HY3.hidden
    return 2.0 * tokens * (dense + (HY3.top_k + 1) * 3 * HY3.hidden * HY3.inner)
