"""Tokens a second with drafts against none, beside what bytes and operations allow.

    python bench/speculation.py injected MODEL_DIR [--quantization w4a8] [--batch-size 1 4 16]
    python bench/speculation.py edit MODEL_DIR [--quantization w4a8] [--drafts 4 8 16 32]
    python bench/speculation.py graphs MODEL_DIR [--quantization w4a8]

injected: text sampled from the model itself, drafts of which a given share is right, at no cost of
their own. edit: a source file of 2,000 tokens is said again with 1% of its lines changed; drafts
by prompt lookup, and a sampler that says that text whatever the model draws. --spread gives each
different line token ids of its own, so that tokens choose experts as the bound supposes: a random
model sends equal tokens to the same ones. graphs: a verification step through Python, captured, and
while it is captured. All drive the runner with whole batches: no scheduler, no detokeniser. Each
round runs no drafts and every number of drafts in turn.

Bound: the longer of reading (weights once; of the experts those that the rows chose, counted apart
from the timing; KV once a sequence) and computing, at this machine's limits, over the tokens that a
step said. Beside it the reading of as many experts as even choices would use, 64 (1 - (7/8)^rows).
"""

import argparse
import json
import re
import statistics
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.drafted_runs import DraftedBatch, Measured

from moestro.backends.cpu import library
from moestro.cli.bench import bound
from moestro.cli.bench.machine import MachineLimits, measure_machine
from moestro.config import EngineConfig
from moestro.core.model_spec import ModelSpec
from moestro.engine.build import LoadedModel, load_model
from moestro.speculative.injected import InjectedDrafter, KnownTexts
from moestro.speculative.prompt_lookup import PromptLookup

ROOT = Path(__file__).parents[1]
PROMPT = 64
SPARE = 48
"""Known tokens behind the last measured one, so that no sequence runs out of drafts."""


def read_bytes(spec: ModelSpec, storage: str, experts: float, seqs: int, context: int) -> float:
    """Bytes that a step reads which uses so many experts of each layer."""
    layers = bound.OURS[storage].layers
    one = sum(m.rows * bound.row_bytes(layers, m.width) for m in bound.matrices(spec) if m.routed)
    least = spec.moe.num_experts_per_tok if spec.moe is not None else 0
    weights = bound.step_bytes(spec, bound.OURS[storage], 1, 0) + (experts - least) * one
    return weights + seqs * context * spec.kv_bytes_per_token(2)


def bounds_s(
    spec: ModelSpec, machine: MachineLimits, given: dict[str, Any], rows: float, experts: float
) -> tuple[float, float, float]:
    """Seconds of reading what so many rows used, what even choices would, and of computing."""
    moe, context, storage = spec.moe, given["context"], given["storage"]
    evenly = 0.0
    if moe is not None:
        evenly = bound.experts_used(moe.num_experts, moe.num_experts_per_tok, round(rows))
    read, expected = (
        read_bytes(spec, storage, used, given["batch_size"], context) / machine.read_gbps / 1e9
        for used in (experts, evenly)
    )
    peak = machine.int8_gops if storage != "bf16" else machine.bf16_gflops
    peak = peak or machine.fp32_gflops
    count = round(rows)
    operations = bound.flops(spec, count, pairs=count * context, outputs=count)
    return read, expected, operations / peak / 1e9


def row_of(
    measured: Measured, plain: Measured, machine: MachineLimits, spec: ModelSpec, **given: Any
) -> dict[str, Any]:
    """What is reported of one number of drafts."""
    steps = len(measured.seconds)
    rows = given["batch_size"] + measured.drafts / steps
    reads, evenly, computes = bounds_s(spec, machine, given, rows, measured.experts)
    tokens = sum(measured.tokens) / steps
    limit = tokens / max(reads, computes)
    return {
        **given,
        "steps": steps,
        "rows_a_step": rows,
        "tokens_a_step": tokens,
        "step_ms": statistics.mean(measured.seconds) * 1e3,
        "median_step_ms": statistics.median(measured.seconds) * 1e3,
        "tokens_a_second": measured.rate,
        "speedup": measured.rate / plain.rate,
        "experts_a_layer": measured.experts,
        "bound_bytes_ms": reads * 1e3,
        "bound_bytes_evenly_ms": evenly * 1e3,
        "bound_flops_ms": computes * 1e3,
        "bound_tokens_a_second": limit,
        "share_of_bound": measured.rate / limit,
        "share_of_bytes_bound": measured.rate * reads / tokens,
        "share_of_bytes_bound_evenly": measured.rate * evenly / tokens,
    }


def injected(args: argparse.Namespace, loaded: LoadedModel) -> list[dict[str, Any]]:
    """Every acceptance and number of drafts, for each batch size."""
    return [row for size in args.batch_size for row in injected_batch(args, loaded, size)]


def injected_batch(
    args: argparse.Namespace, loaded: LoadedModel, size: int
) -> list[dict[str, Any]]:
    """Of one batch size."""
    count = args.tokens or max(24, 96 // size)
    machine, room = measure_machine(args.num_threads), PROMPT + count + SPARE
    generator = torch.Generator().manual_seed(size)
    drawn = torch.randint(5, loaded.spec.vocab_size, (size, PROMPT), generator=generator)
    prompts = drawn.tolist()
    plain = DraftedBatch(loaded, prompts, room, 0)
    plain.start()
    plain.decode(count + SPARE)
    texts = plain.tokens

    def drafting(k: int, share: float, *, graphs: bool = True) -> DraftedBatch:
        drafter = InjectedDrafter(KnownTexts(texts), (share,), loaded.spec.vocab_size)
        return DraftedBatch(loaded, prompts, room, k, drafter, graphs=graphs)

    batches = {(k, share): drafting(k, share) for k in args.drafts for share in args.acceptance}
    batches[0, 0.0] = plain
    measured = {key: Measured() for key in sorted(batches)}
    for number in range(args.rounds):
        for key, found in measured.items():
            batches[key].start()
            if number == 0:
                batches[key].decode(2)  # captures
            found.add(batches[key].decode(count))
            for tokens, text in zip(batches[key].tokens, texts, strict=True):
                assert tokens[: len(text)] == text[: len(tokens)]
    given = {"storage": args.storage, "batch_size": size, "context": PROMPT + count // 2}
    rows = []
    for (k, share), found in measured.items():
        found.experts = drafting(k, share, graphs=False).experts_a_step(min(count, 24))
        row = row_of(found, measured[0, 0.0], machine, loaded.spec, drafts=k, **given)
        rows.append(row | {"acceptance": share if k else None})
        batches[k, share].close()
    rows[0]["machine"] = vars_of(machine)
    return rows


def edited(text: str, share: float) -> str:
    """With that share of its lines changed, evenly spread."""
    lines = text.splitlines(keepends=True)
    count = max(1, round(share * len(lines)))
    for i in range(count):
        at = (2 * i + 1) * len(lines) // (2 * count)
        lines[at] = "    " + lines[at].strip()[::-1] + "  # changed\n"
    return "".join(lines)


def ids_of(text: str, vocab_size: int, *, spread: bool) -> list[int]:
    """An id a word, sign or run of blanks: from a hash of it, or of its line and place there."""
    ids = []
    for line in text.splitlines(keepends=True):
        for at, piece in enumerate(re.findall(r"\w+|\s+|[^\w\s]", line)):
            key = f"{at} {line}" if spread else piece
            ids.append(5 + zlib.crc32(key.encode()) % (vocab_size - 5))
    return ids


def edit(args: argparse.Namespace, loaded: LoadedModel) -> list[dict[str, Any]]:
    """A file said again with some lines changed; batch 1."""
    spec = loaded.spec
    lines = Path(args.file).read_text().splitlines(keepends=True)

    def ids(text: str) -> list[int]:
        return ids_of(text, spec.vocab_size, spread=args.spread)

    while len(ids("".join(lines))) > args.file_tokens:
        del lines[-1]
    source = "".join(lines)
    ask = "\n# The same file with the changes asked for:\n"
    parts = [ids(text) for text in (source, ask, edited(source, args.changed))]
    prompt, target = [*parts[0], *parts[1]], parts[2]
    text = [*prompt, *target]
    spare = 3 * (1 + max(args.drafts))  # a step may say more than it is asked to
    count = min(args.tokens or len(target), len(target) - 2 - spare)
    machine = measure_machine(args.num_threads)

    def drafting(k: int, *, graphs: bool = True) -> DraftedBatch:
        lookup = PromptLookup(2, 4)
        return DraftedBatch(loaded, [prompt], len(text), k, lookup, texts=[text], graphs=graphs)

    batches = {k: drafting(k) for k in (0, *args.drafts)}
    measured = {k: Measured() for k in batches}
    for _ in range(args.rounds):
        for k, batch in batches.items():
            batch.start()
            batch.decode(2)
            measured[k].add(batch.decode(min(count, 96) if k == 0 else count))
    for k in batches:
        measured[k].experts = drafting(k, graphs=False).experts_a_step(32 if k == 0 else 200)
    given = {"storage": args.storage, "batch_size": 1, "context": len(prompt) + count // 2}
    rows = []
    for k, batch in batches.items():
        row = row_of(measured[k], measured[0], machine, spec, drafts=k, **given)
        verified = measured[k].drafts
        accepted = sum(measured[k].tokens) - len(measured[k].seconds)
        rows.append(row | {"drafts_accepted": accepted / verified if verified else None})
        batch.close()
    rows[0] |= {"prompt_tokens": len(prompt), "machine": vars_of(machine)}
    return rows


def graphs(args: argparse.Namespace, loaded: LoadedModel) -> list[dict[str, Any]]:
    """Milliseconds of a verification step: eager, captured, and while it is captured."""
    rows = []
    for size in args.batch_size:
        generator = torch.Generator().manual_seed(size)
        prompts = torch.randint(5, loaded.spec.vocab_size, (size, PROMPT), generator=generator)
        for k in args.drafts:
            taken: dict[str, list[float]] = {"eager": [], "graph": [], "capture": []}
            texts = [[*p, *([7] * 400)] for p in prompts.tolist()]
            both = {}
            for name in ("eager", "graph"):
                drafter = InjectedDrafter(lambda _: [9] * 99, (1.0,), 50)  # never said
                both[name] = DraftedBatch(
                    loaded, prompts.tolist(), 400, k, drafter, graphs=name == "graph", texts=texts
                )
                both[name].start()
            for _ in range(5):
                both["graph"].runner._graphs._captured.clear()  # type: ignore[union-attr]
                taken["capture"] += both["graph"].decode(1).seconds
            for number in range(args.rounds * 10):
                for name in ("eager", "graph")[:: 1 if number % 2 else -1]:
                    taken[name] += both[name].decode(1).seconds
            ms = {f"{n}_ms": statistics.median(t[1:]) * 1e3 for n, t in taken.items()}
            rows.append({"batch_size": size, "drafts": k, **ms})
            for batch in both.values():
                batch.close()
    return rows


def vars_of(machine: MachineLimits) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in machine.__dataclass_fields__}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=("injected", "edit", "graphs"))
    parser.add_argument("model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3, 5, 8])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--tokens", type=int, default=0, help="of a sequence; 0: chosen by batch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-threads", type=int, default=2)
    default = ROOT / "src" / "moestro" / "scheduler" / "scheduler.py"
    parser.add_argument("--file", default=str(default), help="what edit repeats")
    parser.add_argument("--file-tokens", type=int, default=2000)
    parser.add_argument("--changed", type=float, default=0.01, help="share of lines")
    parser.add_argument("--spread", action="store_true", help="ids that choose experts evenly")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    options = {"model": args.model, "num_threads": args.num_threads, "max_model_len": 8192}
    if args.quantization != "none":
        options["quantization"] = args.quantization
    args.storage = "bf16" if args.quantization == "none" else args.quantization
    loaded = load_model(EngineConfig.from_kwargs(**options))
    loaded.model.reserve_positions(8192)
    with torch.inference_mode():
        rows = {"injected": injected, "edit": edit, "graphs": graphs}[args.workload](args, loaded)
    if args.json:
        report = {"device": library.identity(), "argv": sys.argv, "rows": rows}
        json.dump(report, sys.stdout, indent=1)
        return
    for row in rows:
        shown = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}
        print(" ".join(f"{k}={v}" for k, v in shown.items() if k != "machine"))


if __name__ == "__main__":
    main()
