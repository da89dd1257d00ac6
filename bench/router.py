"""The router beside torch's fp32 matrix product, in alternating pairs.

    python bench/router.py [--num-threads 2] [--experts 192] [--hidden 4096] [--json]

Ours: logits from bf16 activations and two bf16 numbers a weight (one where the weight is bf16
already), fp32 out; with the choice of experts and without it. Torch: F.linear on fp32 x and fp32
weight, logits only, x already widened. Weights rotate over copies that no cache holds together.
Medians of the pairs; the ratio is the median of the pairs' own.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812

from moestro import ops
from moestro.backends import load_backend
from moestro.cli.bench.works.work import Turn

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
RULE = ops.GatingRule(8, "sigmoid", True, 1e-20, 2.826)
COPIES_BYTES = 96 << 20


def _paired(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> dict:
    mine, other = (Turn(lambda _, call=call: call()) for call in (ours, theirs))
    pairs = []
    end = time.perf_counter() + seconds
    while len(pairs) < 7 or (time.perf_counter() < end and len(pairs) < 200):
        if len(pairs) % 2:
            b, a = other.seconds(), mine.seconds()
        else:
            a, b = mine.seconds(), other.seconds()
        pairs.append((a, b))
    return {
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "torch_us": statistics.median(b for _, b in pairs) * 1e6,
        "ratio": statistics.median(b / a for a, b in pairs),
        "pairs": len(pairs),
    }


def measure(experts: int, hidden: int, seconds: float) -> list[dict]:
    """One entry for each number of tokens and kind of work."""
    device = load_backend("cpu")
    generator = torch.Generator().manual_seed(0)
    copies = max(2, COPIES_BYTES // (experts * hidden * 4))
    plain = [torch.randn((experts, hidden), generator=generator) * 0.02 for _ in range(copies)]
    dual, single = (
        [device.pack_router(ops.RouterWeights(w, None, terms)) for w in plain] for terms in (2, 1)
    )
    rows = []
    for tokens in TOKENS:
        x = torch.randn((tokens, hidden), generator=generator).bfloat16()
        wide = x.float()
        turn = [0]

        def next_of(items: list, turn: list[int] = turn) -> object:
            turn[0] += 1
            return items[turn[0] % len(items)]

        works = {
            "two terms, routed": lambda x=x, n=next_of: ops.moe_router(x, n(dual), RULE),
            "two terms, logits": lambda x=x, n=next_of: ops.router_logits(x, n(dual)),
            "one term, logits": lambda x=x, n=next_of: ops.router_logits(x, n(single)),
        }
        for name, ours in works.items():
            timed = _paired(ours, lambda w=wide, n=next_of: F.linear(w, n(plain)), seconds)
            rows.append({"tokens": tokens, "work": name, **timed})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a row")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    device = load_backend("cpu")
    device.set_num_threads(args.num_threads)
    with torch.inference_mode():
        rows = measure(args.experts, args.hidden, args.seconds)
    if args.json:
        json.dump({"device": device.identity, "rows": rows, "argv": sys.argv}, sys.stdout, indent=2)
        return
    print(f"{device.identity}, {args.num_threads} threads, {args.experts} x {args.hidden}")
    for row in rows:
        print(
            f"{row['tokens']:>5} tokens, {row['work']:<18} {row['ours_us']:>9.1f} us, "
            f"torch {row['torch_us']:>9.1f} us, {row['ratio']:.2f}x ({row['pairs']} pairs)"
        )


if __name__ == "__main__":
    main()
