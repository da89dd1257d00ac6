"""Attention over batches of unequal lengths, and the element-wise chain before it.

    python bench/attention.py [--pairs 12] [--only mixes chain] [--kv bfloat16] [--json]

Mixes: the planned task map beside a fixed split of every sequence into S parts (1, 4, 8, 16, 32)
and, where a request is one block of queries, one thread a request, in turns; the maps are made
beforehand, and whoever is free takes the next task of each of them. One layer of Hy3's share at
TP8: 8 heads over 1 kv head of 128. KV lies in several pools that take turns, so that no cache
holds it; the share of the machine's bandwidth is of what it reads in this very run. Chain:
qk_norm_rope_store beside torch's ops one after another, 64 heads over 8 of 128.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from moestro import ops
from moestro.backends import load_backend
from moestro.backends.cpu import library, machine
from moestro.ops.attention_plan import AttentionPlan, PlanShape, cut_units, find_units
from moestro.quant.kv import KV_DTYPES, LARGEST_CODE, quantize_rows

Call = Callable[[], object]

HEADS, KV_HEADS, DIM, PAGE = 8, 1, 128, 64
POOLS = 4
MIXES: dict[str, tuple[tuple[int, int], ...]] = {
    "decode 1x32K + 15x1K": ((32767, 1), *((1023, 1),) * 15),
    "decode 1x16K + 8x512": ((16383, 1), *((511, 1),) * 8),
    "decode 16x2K": ((2047, 1),) * 16,
    "decode 1x32K": ((32767, 1),),
    "prefill 8x512 + 1x16K": (*((0, 512),) * 8, (14336, 2048)),
    "prefill 2048": ((0, 2048),),
}
"""(context, queries) of each sequence."""
SPLITS = (1, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Row:
    """Median milliseconds of ours and of another; ratios are medians of those of pairs."""

    name: str
    other: str
    ours_ms: float
    other_ms: float
    ratio: float
    gb_per_s: float | None = None
    share_of_bandwidth: float | None = None
    gflop_per_s: float | None = None


def _pages(num_pages: int, dtype: torch.dtype) -> ops.KVPages:
    shape = (num_pages, KV_HEADS, PAGE, DIM)
    k, v = torch.randn(shape), torch.randn(shape)
    if dtype not in LARGEST_CODE:
        return ops.KVPages(k.to(dtype), v.to(dtype))
    (k, k_scales), (v, v_scales) = (quantize_rows(t, dtype) for t in (k, v))
    return ops.KVPages(k, v, k_scales, v_scales)


class Mix:
    """A batch, and attention over it by any map."""

    def __init__(
        self, sequences: Sequence[tuple[int, int]], dtype: torch.dtype, threads: int
    ) -> None:
        counts = [-(-(context + queries) // PAGE) for context, queries in sequences]
        self.pools = [_pages(sum(counts), dtype) for _ in range(POOLS)]
        table = torch.zeros((len(counts), max(counts)), dtype=torch.int32)
        order, taken = torch.randperm(sum(counts)).int(), 0
        for s, count in enumerate(counts):
            table[s, :count] = order[taken : taken + count]
            taken += count
        starts = torch.tensor([0, *(queries for _, queries in sequences)]).cumsum(0).int()
        lengths = [context + queries for context, queries in sequences]
        tokens = int(starts[-1])
        self.q = torch.randn(tokens, HEADS, DIM).bfloat16()
        self.metadata = ops.AttentionMetadata(
            starts,
            torch.tensor(lengths, dtype=torch.int32),
            table,
            torch.zeros(tokens, dtype=torch.int64),
            max(queries for _, queries in sequences),
            max(lengths),
        )
        row = 2 * DIM * dtype.itemsize + 8 * (dtype in LARGEST_CODE)
        self.shape = PlanShape(HEADS, KV_HEADS, DIM, row, threads)
        self.units = find_units(starts.tolist(), lengths, self.shape)
        self.gigabytes = sum(lengths) * KV_HEADS * row / 1e9
        seen = sum(q * c + q * (q + 1) // 2 for c, q in sequences)
        self.gigaflops = 4 * seen * HEADS * DIM / 1e9
        self._turn = 0

    def planned(self) -> ops.AttentionMetadata:
        return self.metadata.planned(self.pools[0], HEADS)

    def split(self, parts: int) -> ops.AttentionMetadata:
        """Every block of queries in `parts` even ranges of super-tiles, in order of requests."""
        steps = [max(1, -(-unit.num_supers // parts)) for unit in self.units]
        plan = cut_units(self.units, steps, self.shape)
        tasks = sorted(plan.tasks, key=lambda t: (t.seq, t.kv_head, t.block, t.begin))
        ordered = AttentionPlan(tuple(tasks), plan.num_cut, plan.num_slots, plan.state_rows)
        words = ordered.words(self.shape, len(self.metadata.seq_lens), len(self.q))
        return replace(self.metadata, plan=torch.tensor(words, dtype=torch.int32))

    def call(self, metadata: ops.AttentionMetadata) -> Call:
        def run() -> object:
            self._turn = (self._turn + 1) % POOLS
            return ops.paged_attention(self.q, self.pools[self._turn], metadata, DIM**-0.5)

        return run


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _pairs(ours: Call, other: Call, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of both, in turns, who goes first alternating."""
    ours(), other()
    mine, theirs = [], []
    for i in range(pairs):
        first, second = (ours, other) if i % 2 else (other, ours)
        a, b = _seconds(first), _seconds(second)
        mine.append(a if i % 2 else b)
        theirs.append(b if i % 2 else a)
    return mine, theirs


def _mixes(dtype: torch.dtype, threads: int, pairs: int) -> list[Row]:
    rows = []
    for name, sequences in MIXES.items():
        mix = Mix(sequences, dtype, threads)
        ours = mix.call(mix.planned())
        others = {f"fixed split {s}": mix.split(s) for s in SPLITS}
        if len(mix.units) == len(sequences):
            others["one thread a request"] = others.pop("fixed split 1")
        bandwidth = statistics.median(machine.read_rates(2**29, 5)) / 1e9
        for label, metadata in others.items():
            turns = pairs if mix.gigaflops < 20 else max(2, pairs // 4)
            mine, theirs = _pairs(ours, mix.call(metadata), turns)
            seconds = statistics.median(mine)
            rate = mix.gigabytes / seconds
            ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True))
            rows.append(
                Row(
                    name,
                    label,
                    seconds * 1e3,
                    statistics.median(theirs) * 1e3,
                    ratio,
                    rate,
                    rate / bandwidth,
                    mix.gigaflops / seconds,
                )
            )
    return rows


def _unfused(
    qkv: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    rotary: ops.Rotary,
    pages: ops.KVPages,
    slots: torch.Tensor,
) -> torch.Tensor:
    """The chain in torch's ops, each rounding to the model's type as eager models do."""
    heads = qkv.view(len(qkv), -1, DIM)
    q, k, v = heads.split((64, 8, 8), dim=1)
    cos, sin = rotary.table.index_select(0, rotary.positions).to(qkv.dtype)[:, None].chunk(2, -1)
    turned = []
    for x, weight in zip((q, k), weights, strict=True):
        normed = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-5)
        low, high = normed.chunk(2, dim=-1)
        turned.append(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
    page, offset = slots // PAGE, slots % PAGE
    for x, held, scales in (
        (turned[1], pages.k, pages.k_scales),
        (v, pages.v, pages.v_scales),
    ):
        if scales is None:
            held[page, :, offset] = x
            continue
        scale = x.float().abs().amax(-1) / LARGEST_CODE[held.dtype]
        codes = x.float() / scale[..., None]
        if held.dtype == torch.int8:
            codes = codes.round()
        held.view(torch.uint8)[page, :, offset] = codes.to(held.dtype).view(torch.uint8)
        scales[page, :, offset] = scale
    return turned[0]


def _chain(pairs: int) -> list[Row]:
    rows = []
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        for tokens in (1, 32, 512):
            shape = (16, 8, PAGE, DIM)
            k, v = torch.zeros((2, *shape)).to(dtype)
            scales = torch.zeros((2, *shape[:3])) if dtype in LARGEST_CODE else (None, None)
            pages = ops.KVPages(k, v, *scales)
            qkv = torch.randn(tokens, 80 * DIM).bfloat16()
            weights = torch.ones(DIM).bfloat16(), torch.ones(DIM).bfloat16()
            rotary = ops.Rotary(torch.randn(4096, DIM), torch.randint(4096, (tokens,)))
            slots = torch.randperm(16 * PAGE)[:tokens]
            arguments = (qkv, *weights, rotary, 1e-5, pages, slots)
            repeat = max(1, 256 // tokens)

            def ours(arguments: tuple = arguments, repeat: int = repeat) -> None:
                for _ in range(repeat):
                    ops.qk_norm_rope_store(*arguments)

            unfused = (qkv, weights, rotary, pages, slots)

            def theirs(unfused: tuple = unfused, repeat: int = repeat) -> None:
                for _ in range(repeat):
                    _unfused(*unfused)

            a, b = _pairs(ours, theirs, pairs)
            rows.append(
                Row(
                    f"chain, {tokens} tokens into {str(dtype).removeprefix('torch.')}",
                    "torch, an op at a time",
                    statistics.median(a) * 1e3 / repeat,
                    statistics.median(b) * 1e3 / repeat,
                    statistics.median(y / x for x, y in zip(a, b, strict=True)),
                )
            )
    return rows


def _line(row: Row) -> str:
    rate = ""
    if row.gb_per_s is not None:
        rate = f"{row.gb_per_s:7.1f} GB/s {row.share_of_bandwidth:5.0%} {row.gflop_per_s:6.0f} GF/s"
    return (
        f"{row.name:32} {row.ours_ms:9.3f} ms  {row.other:24} {row.other_ms:9.3f} ms "
        f"{row.ratio:6.2f}x {rate}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", nargs="+", choices=("mixes", "chain"), default=["mixes", "chain"])
    parser.add_argument("--kv", choices=("bfloat16", "int8", "fp8"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load_backend("cpu").set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = []
    with torch.inference_mode():
        if "mixes" in args.only:
            rows += _mixes(KV_DTYPES[args.kv], args.threads, args.pairs)
        if "chain" in args.only:
            rows += _chain(args.pairs)
    if args.json:
        what = {"identity": library.identity(), "kv": args.kv, "threads": args.threads}
        json.dump({**what, "rows": [asdict(row) for row in rows]}, sys.stdout, indent=1)
        return
    print(f"{library.identity()}, {args.threads} threads, KV {args.kv}, {args.pairs} pairs")
    for row in rows:
        print(_line(row))


if __name__ == "__main__":
    main()
