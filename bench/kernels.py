"""Times the CPU kernels beside torch's own ops, interleaved, on the shapes of the bench model.

    python bench/kernels.py [--isa avx512] [--threads 2] [--only linear moe attention] [--json]

Each row: median milliseconds of both, and what they mean in GB/s (bytes of weights or KV that the
call has to read, each once) and GFLOP/s. Weights rotate over several copies, so that a small
product does not find them in a cache.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from moestro import ops
from moestro.backends import load_backend
from moestro.backends.cpu import library

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement: our call and torch's, given the number of the repetition."""

    name: str
    ours: Call
    torch: Call
    gigabytes: float
    gigaflops: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    ours_ms: float
    torch_ms: float
    ours_gb_per_s: float
    torch_gb_per_s: float
    ours_gflop_per_s: float
    torch_gflop_per_s: float


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def _linear(tokens: int, inputs: int, outputs: int) -> Work:
    copies = max(2, 2**28 // (2 * inputs * outputs))
    weights = [_normal(outputs, inputs) for _ in range(copies)]
    x = _normal(tokens, inputs)
    return Work(
        f"linear {tokens}x{inputs}->{outputs}",
        lambda i: ops.linear(x, weights[i % copies]),
        lambda i: F.linear(x, weights[i % copies]),
        2 * inputs * outputs / 1e9,
        2 * tokens * inputs * outputs / 1e9,
    )


def _torch_experts(x: torch.Tensor, routing: ops.Routing, w: ops.ExpertWeights) -> torch.Tensor:
    """One F.linear per expert that has tokens, as eager implementations do."""
    out = torch.zeros_like(x)
    for expert in routing.topk_ids.unique().tolist():
        token, choice = (routing.topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w.gate_up_proj[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w.down_proj[expert])
        y = y * routing.topk_weights[token, choice, None].to(y.dtype)
        out.index_add_(0, token, y)
    return out


def _moe(tokens: int) -> Work:
    hidden, experts, top_k, inner, layers = 1024, 64, 8, 384, 2
    weights = [
        ops.ExpertWeights(
            _normal(experts, 2 * inner, hidden, scale=0.03),
            _normal(experts, hidden, inner, scale=0.03),
        )
        for _ in range(layers)
    ]
    x = _normal(tokens, hidden)
    routings = [
        ops.moe_gating_top_k(torch.randn(tokens, experts), None, top_k, "softmax", True, 0.0, 1.0)
        for _ in range(16)
    ]
    used = statistics.mean(r.topk_ids.unique().numel() for r in routings)
    size = 3 * hidden * inner
    return Work(
        f"moe {tokens} tokens",
        lambda i: ops.moe_experts(x, routings[i % 16], weights[i % layers], True),
        lambda i: _torch_experts(x, routings[i % 16], weights[i % layers]),
        2 * used * size / 1e9,
        2 * tokens * top_k * size / 1e9,
    )


def _attention(queries: int, length: int) -> Work:
    heads, kv_heads, dim, page, layers = 16, 4, 128, 64, 8
    num_pages = length // page
    pools = [
        ops.KVPages(
            _normal(num_pages, kv_heads, page, dim), _normal(num_pages, kv_heads, page, dim)
        )
        for _ in range(layers)
    ]
    plain = [
        tuple(t.transpose(0, 1).reshape(1, kv_heads, length, dim) for t in (p.k, p.v))
        for p in pools
    ]
    q = _normal(queries, heads, dim)
    metadata = ops.AttentionMetadata(
        torch.tensor([0, queries], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        torch.arange(num_pages, dtype=torch.int32)[None],
        torch.zeros(queries, dtype=torch.int64),
        queries,
        length,
    )
    seen = queries * (length - queries) + queries * (queries + 1) // 2
    return Work(
        f"attention {queries} of {length}",
        lambda i: ops.paged_attention(q, pools[i % layers], metadata, dim**-0.5),
        lambda i: F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], *plain[i % layers], is_causal=queries > 1, enable_gqa=True
        ),
        4 * length * kv_heads * dim / 1e9,
        4 * seen * heads * dim / 1e9,
    )


def _works(only: list[str]) -> Iterator[Work]:
    if "linear" in only:
        for inputs, outputs in ((1024, 3072), (1024, 4096), (4096, 4096), (1024, 32768)):
            for tokens in (1, 8, 64, 512):
                yield _linear(tokens, inputs, outputs)
    if "moe" in only:
        for tokens in (1, 8, 64, 512, 2048):
            yield _moe(tokens)
    if "attention" in only:
        for queries, length in ((1, 512), (1, 4096), (512, 512), (2048, 2048)):
            yield _attention(queries, length)


def _measure(work: Work, seconds: float) -> Row:
    times: tuple[list[float], list[float]] = ([], [])
    for call in (work.ours, work.torch):
        call(0)
    start, i = time.perf_counter(), 0
    while i < 5 or time.perf_counter() - start < seconds:
        i += 1
        for call, into in zip((work.ours, work.torch), times, strict=True):
            began = time.perf_counter()
            call(i)
            into.append(time.perf_counter() - began)
    ours, theirs = (statistics.median(t) for t in times)
    return Row(
        work.name,
        ours * 1e3,
        theirs * 1e3,
        work.gigabytes / ours,
        work.gigabytes / theirs,
        work.gigaflops / ours,
        work.gigaflops / theirs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: all this process may use")
    parser.add_argument("--isa", help="kernel level (default: MOESTRO_CPU_ISA, else the best)")
    parser.add_argument("--only", nargs="+", default=["linear", "moe", "attention"])
    parser.add_argument("--seconds", type=float, default=2.0, help="per row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = load_backend("cpu")
    threads = args.threads or device.hardware().num_threads
    device.set_num_threads(threads)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    native = library.native()
    with native.at_level(args.isa or library.status().isa):
        print(f"{native.level().decode()}, {threads} threads", file=sys.stderr)
        rows = []
        for work in _works(args.only):
            rows.append(_measure(work, args.seconds))
            if not args.json:
                _show(rows[-1])
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))


def _show(row: Row) -> None:
    print(
        f"{row.name:28} {row.ours_ms:9.3f} ms  torch {row.torch_ms:9.3f} ms"
        f"  x{row.torch_ms / row.ours_ms:5.2f}"
        f"  {row.ours_gb_per_s:6.1f} GB/s (torch {row.torch_gb_per_s:6.1f})"
        f"  {row.ours_gflop_per_s:7.1f} GFLOP/s (torch {row.torch_gflop_per_s:7.1f})"
    )


if __name__ == "__main__":
    main()
