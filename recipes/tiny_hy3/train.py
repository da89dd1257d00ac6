"""Train tiny-hy3, anew or from weights; stop and resume at will.

    python -m recipes.tiny_hy3.train data/ run/                          (anew)
    python -m recipes.tiny_hy3.train data/ run/ --resume                 (go on)
    python -m recipes.tiny_hy3.train data/ run/ --from-weights tiny-hy3  (continue from weights)

Muon for the matrices inside, AdamW for tables, norms and routers; MTP loss beside the trunk's;
expert_bias pushed towards even load after each step. A resumed run is, step by step, the run that
was not interrupted. metrics.jsonl in the run folder gets one line a report.
"""

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from recipes.tiny_hy3.evaluate import evaluate
from recipes.tiny_hy3.run_state import load_state, save_state
from recipes.tiny_hy3.schedule import Schedule
from recipes.tiny_hy3.trainer import Trainer
from recipes.tiny_hy3.windows import Windows
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from moestro.core.model_config import load_model_spec
from moestro.errors import MoestroError
from moestro.weights.loader import load_weights
from moestro.weights.source import resolve_model

_VALIDATION_WINDOWS = 8


_OPTIONS = ("tokens", "tokens_per_step", "max_length", "lr", "precision", "seed")
"""What a resumed run must not change."""


class Stop:
    """Within it the first SIGINT or SIGTERM sets `asked`: finish the step, save, leave."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def validate(trainer: Trainer, heldout: NDArray[np.uint16]) -> dict[str, Any]:
    """A short look at the held-out loss, in fp32."""
    window = min(2048, trainer.schedule.max_length, len(heldout))
    trainer.model.eval()
    result = evaluate(trainer.model, heldout, window, _VALIDATION_WINDOWS)
    trainer.model.train()
    return {
        "step": trainer.step,
        "seen_tokens": trainer.seen_tokens,
        "heldout_loss": result.loss,
        "heldout_mtp_loss": result.mtp_loss,
        "heldout_mtp_agreement": result.mtp_agreement,
    }


def save(trainer: Trainer, args: argparse.Namespace) -> None:
    """The run's state, with the options a resumed run must repeat."""
    options = {name: getattr(args, name) for name in _OPTIONS}
    save_state(args.run, {**trainer.state(), "options": options})


def run(trainer: Trainer, args: argparse.Namespace, heldout: NDArray[np.uint16]) -> None:
    """Train until the token budget is spent or the user stops."""
    console = Console(stderr=True)
    metrics = args.run / "metrics.jsonl"

    def log(entry: Mapping[str, Any]) -> None:
        with metrics.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        console.print(" ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                               for k, v in entry.items()))  # fmt: skip

    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress, Stop() as stop:
        task = progress.add_task("training", total=args.tokens, note="")
        progress.update(task, completed=trainer.seen_tokens)
        log(validate(trainer, heldout))
        started, first = time.monotonic(), trainer.seen_tokens
        while trainer.seen_tokens < args.tokens and not stop.asked:
            report = trainer.train_step()
            speed = (report.seen_tokens - first) / (time.monotonic() - started)
            note = f"loss {report.loss:.3f} mtp {report.mtp_loss:.3f} {speed:.0f} tok/s"
            progress.update(task, completed=report.seen_tokens, note=note)
            if report.step % args.report_every == 0:
                log({f: getattr(report, f) for f in report.__slots__} | {"tokens_per_s": speed})
            if report.step % args.save_every == 0:
                save(trainer, args)
                log(validate(trainer, heldout))
        save(trainer, args)
        log(validate(trainer, heldout))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("data", type=Path, help="folder written by prepare_data")
    add("run", type=Path, help="folder of this run: state, metrics, config")
    add("--config", metavar="MODEL", default="tiny-hy3", help="whose config.json to train")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="go on from the run's state")
    start.add_argument("--from-weights", metavar="MODEL", help="start from this model's weights")
    add("--tokens", type=int, default=15_600_000, help="of the whole run")
    add("--tokens-per-step", type=int, default=4096)
    add("--max-length", type=int, default=8192, help="longest training sequence")
    add("--lr", type=float, default=3e-3, help="of AdamW; Muon's is 10/3 of it")
    add("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    add("--report-every", type=int, default=20, help="steps")
    add("--save-every", type=int, default=200, help="steps")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("tokens", "tokens_per_step", "max_length", "report_every", "save_every", "lr"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    return args


def build_trainer(args: argparse.Namespace) -> Trainer:
    """The run's trainer in its starting state: new, from weights, or resumed."""
    state = load_state(args.run) if args.resume else None
    if state is None and (args.run / "state.pt").exists():
        raise SystemExit(f"{args.run} holds a run already; --resume it or name another folder")
    source = args.run if args.resume else resolve_model(args.from_weights or args.config)
    spec = load_model_spec(source)
    windows = Windows.open(args.data, args.seed)
    if windows.tokenizer.get_vocab_size() > spec.vocab_size:
        raise SystemExit(
            f"{args.data} has {windows.tokenizer.get_vocab_size()} token ids, the model "
            f"{spec.vocab_size}: prepare_data with --vocab-size or --tokenizer-of"
        )
    schedule = Schedule(args.tokens, args.tokens_per_step, args.max_length)
    trainer = Trainer(spec, windows, schedule, args.lr, getattr(torch, args.precision))
    if state is not None:
        changed = [f"--{n.replace('_', '-')} {v}" for n, v in state["options"].items()
                   if getattr(args, n) != v]  # fmt: skip
        if changed:
            raise SystemExit(f"{args.run} was started with {', '.join(changed)}: repeat them")
        trainer.restore(state)
    elif args.from_weights:
        load_weights(spec, trainer.model.state_dict(), source)
    if not args.resume:
        args.run.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / "config.json", args.run / "config.json")
    return trainer


def main() -> None:
    args = parse_args()
    try:
        heldout = np.load(args.data / "heldout.npz")["ids"]
        run(build_trainer(args), args, heldout)
    except (MoestroError, OSError) as error:
        sys.exit(f"train: {error}")


if __name__ == "__main__":
    main()
