"""`moestro eval routing`: how often the router chooses other experts than exact maths would."""

import argparse
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.config import EngineConfig, add_engine_flags, engine_config_from_args
from moestro.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from moestro.runner.routing_meter import LayerFlips

HELP = "expert choices that differ from float64's"
DESCRIPTION = (
    "Runs a model over a text and compares, in every MoE layer, the experts that the router as "
    "served chooses with those of float64 maths on the same hidden states. Beside it: plain bf16 "
    "router weights with fp32 logits, and the served weights with logits rounded to bf16. Without "
    "--text the text is Python's own library, files that tiny-hy3 was not trained on."
)

_HELDOUT = ("difflib.py", "importlib/_bootstrap.py", "test/test_socket.py")
_LEAST_TOKENS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro eval routing`."""
    group = parser.add_argument_group("Evaluation")
    group.add_argument("--text", metavar="FILE", help="text to run over (UTF-8); - reads stdin")
    group.add_argument(
        "--num-tokens", type=int, default=8192, metavar="N", help="at most so many (default: 8192)"
    )
    group.add_argument(
        "--window", type=int, default=2048, metavar="N", help="tokens of a context (default: 2048)"
    )
    add_engine_flags(parser)
    add_common_flags(parser, json_help="print the counts as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    start_logging(args)
    for flag, value in (("--num-tokens", args.num_tokens), ("--window", args.window)):
        if value < _LEAST_TOKENS:
            raise ConfigError(f"{flag} must be at least {_LEAST_TOKENS}, got {value}.")
    config = engine_config_from_args(args)
    source, text = _text(args.text)
    if not text:
        raise ConfigError(f"The text ({source}) is empty: there is nothing to route.")
    result = {
        **_measure(config, text, args.num_tokens, args.window),
        "text": source,
        "command": args.command_line,
    }
    if args.json:
        print_json(result)
    else:
        write_text("\n".join(_lines(result)) + "\n")
    return 0


def _measure(config: EngineConfig, text: str, num_tokens: int, window: int) -> dict[str, Any]:
    import torch

    from moestro.backends.cpu import library
    from moestro.cli.loading_bar import loading_bar
    from moestro.engine.build import load_model
    from moestro.runner.routing_meter import measure_routing

    with loading_bar() as (progress, _):
        loaded = load_model(config, progress)
    if loaded.spec.moe is None:
        raise UnsupportedError(f"{config.model} has no router: none of its layers has experts.")
    window = min(window, loaded.plan.max_model_len)
    token_ids = loaded.tokenizer.encode(text)[:num_tokens]
    layers = measure_routing(loaded.model, getattr(torch, loaded.plan.dtype), token_ids, window)
    return {
        "model": config.model,
        "dtype": loaded.plan.dtype,
        "device": library.identity(),
        "num_tokens": len(token_ids),
        "window": window,
        "experts": loaded.spec.moe.num_experts,
        "top_k": loaded.spec.moe.num_experts_per_tok,
        "layers": [asdict(layer) for layer in layers],
        "total": asdict(_total(layers)),
    }


def _total(layers: "Sequence[LayerFlips]") -> "LayerFlips":
    from moestro.runner.routing_meter import LayerFlips

    total = LayerFlips(-1, max((layer.terms for layer in layers), default=0))
    for layer in layers:
        total.num_tokens += layer.num_tokens
        total.flipped += layer.flipped
        total.flipped_bf16_weights += layer.flipped_bf16_weights
        total.flipped_bf16_logits += layer.flipped_bf16_logits
    return total


def _lines(result: dict[str, Any]) -> list[str]:
    head = (
        f"{result['model']} ({result['dtype']}, {result['device']}): {result['num_tokens']:,} "
        f"tokens of {result['text']}, {result['top_k']} of {result['experts']} experts"
    )
    titles = ("layer", "router weights", "flipped", "bf16 weights", "bf16 logits")
    rows = [titles, *(_row(str(layer["layer"]), layer) for layer in result["layers"])]
    rows.append(_row("all", result["total"]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    table = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return [head, "sets of experts that differ from float64's:", *table]


def _row(name: str, counts: dict[str, Any]) -> tuple[str, ...]:
    def share(field: str) -> str:
        return f"{counts[field]} ({counts[field] / counts['num_tokens']:.3%})"

    weights = ("fp32", "1 x bf16", "2 x bf16")[counts["terms"]]
    flipped = (share(f"flipped{which}") for which in ("", "_bf16_weights", "_bf16_logits"))
    return (name, weights, *flipped)


def _text(given: str | None) -> tuple[str, str]:
    """Where the text is from, and the text. Raises ConfigError."""
    if given == "-":
        return "stdin", _decode("stdin", sys.stdin.buffer.read())
    if given is not None:
        return given, _decode(given, _read(Path(given), "Can't read the text"))
    library = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _HELDOUT if (library / name).is_file()]
    if not names:
        raise ConfigError(f"Python's library is not in {library}: give a text with --text FILE.")
    parts = [_decode(name, _read(library / name, "Can't read the text")) for name in names]
    return f"Python {sys.version.split()[0]}'s {', '.join(names)}", "\n".join(parts)


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} from {path}: {error.strerror}.") from None
    except ValueError as error:  # a name with NUL bytes
        raise ConfigError(f"{what} from {path}: {error}.") from None


def _decode(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"The text of {name} is not UTF-8: {error}.") from None
