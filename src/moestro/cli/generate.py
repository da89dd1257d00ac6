"""`moestro generate`: complete prompts on the command line."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moestro.cli.console import add_common_flags, note, print_json, start_logging, write_text
from moestro.cli.outcome import raise_failed
from moestro.cli.sampling_flags import (
    add_sampling_flags,
    refuse_without_effect,
    sampling_overrides_from_args,
)
from moestro.config import EngineConfig, add_engine_flags, engine_config_from_args
from moestro.core.sampling_params import SamplingParams
from moestro.errors import ConfigError

if TYPE_CHECKING:
    from moestro.core.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 256

HELP = "complete one or several prompts"
DESCRIPTION = (
    "Complete prompts. One prompt streams to stdout as it is generated; several print one after "
    "the other. Sampling values that are not given come from the checkpoint's "
    f"generation_config.json; --max-tokens is {DEFAULT_MAX_TOKENS} where that has none."
)
_JSON_ONLY = {
    "logprobs": "log probabilities are shown with --json only",
    "prompt_logprobs": "log probabilities are shown with --json only",
    "detokenize": "without text there is something to show with --json only",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro generate`."""
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="text to complete; - reads it from stdin"
    )
    parser.add_argument(
        "--prompt-file",
        metavar="FILE",
        action="append",
        default=[],
        help="file whose whole content is a prompt; may be repeated",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, {"max_tokens": f"the checkpoint's, else {DEFAULT_MAX_TOKENS}"})
    add_common_flags(
        parser, json_help="print RequestOutput's fields as JSON; a list for several prompts"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts."""
    start_logging(args, plain=True)
    config = engine_config_from_args(args)
    overrides = sampling_overrides_from_args(args)
    if not args.json:
        refuse_without_effect(overrides, SamplingParams(), _JSON_ONLY)
    prompts = read_prompts(args.prompts, args.prompt_file)
    if len(prompts) == 1 and not args.json:
        _stream(config, prompts[0], overrides)
        return 0
    outputs = _complete(config, prompts, overrides)
    if args.json:
        print_json(outputs[0] if len(outputs) == 1 else outputs)
    else:
        _write(outputs)
    raise_failed(outputs)
    return 0


def read_prompts(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """Prompts from arguments, files and stdin, in that order. Raises ConfigError."""
    if given.count("-") + files.count("-") > 1:
        raise ConfigError("stdin (-) can be read once only: give - once.")
    prompts = [_read("-") if text == "-" else text for text in given]
    prompts += [_read(name) for name in files]
    if not prompts:
        raise ConfigError(
            'No prompt: give one, as in moestro generate "def quicksort(items):", or - for stdin, '
            "or --prompt-file FILE."
        )
    return prompts


def _read(name: str) -> str:
    where = "stdin" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"Can't read the prompt from {where}: {error.strerror}.") from None
    except ValueError as error:  # not UTF-8, or a name with NUL bytes
        raise ConfigError(f"Can't read the prompt from {where}: {error}.") from None


def _params(
    defaults: SamplingParams, max_tokens: int | None, overrides: dict[str, object]
) -> SamplingParams:
    """max_tokens: the checkpoint's, None where it has none."""
    usual = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    return defaults.with_(**{"max_tokens": usual, **overrides})


def _stream(config: EngineConfig, prompt: str, overrides: dict[str, object]) -> None:
    from moestro.cli.local_engine import LocalEngine
    from moestro.cli.text_writer import TextWriter

    with LocalEngine(config) as local:
        engine = local.engine
        params = _params(engine.default_params, engine.default_max_tokens, overrides)
        started = time.perf_counter()
        first: list[tuple[float, int]] = []  # when the first tokens came, and how many

        def on_output(output: "RequestOutput") -> None:
            if not first:
                first.append((time.perf_counter() - started, _num_generated([output])))
            writer.show(output)

        writer = TextWriter()
        last = local.stream(prompt, params, on_output)
        if last is not None:
            _tell_stats([last], time.perf_counter() - started, first[0])
            raise_failed([last])


def _complete(
    config: EngineConfig, prompts: list[str], overrides: dict[str, object]
) -> "list[RequestOutput]":
    from moestro.cli.loading_bar import loading_bar
    from moestro.engine.llm import LLM

    with loading_bar() as (progress, captured):
        llm = LLM.from_config(config, load_progress=progress, graph_progress=captured)
    with llm:
        params = _params(llm.get_default_sampling_params(), llm.default_max_tokens, overrides)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        _tell_stats(outputs, time.perf_counter() - started)
        return outputs


def _write(outputs: "Sequence[RequestOutput]") -> None:
    for output in outputs:
        write_text(f"=== {output.prompt}\n")
        for sequence in output.outputs:
            mark = f"[{sequence.index}] " if len(output.outputs) > 1 else ""
            write_text(f"{mark}{sequence.text}\n")


def _tell_stats(
    outputs: "Sequence[RequestOutput]", seconds: float, first: tuple[float, int] | None = None
) -> None:
    """first: seconds until the first tokens, and how many came with them."""
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    generated = _num_generated(outputs)
    text = f"{prompt} prompt tokens, {generated} generated in {seconds:.2f} s"
    first_s, num_first = first or (seconds, generated)
    if generated > num_first and seconds > first_s:
        speed = (generated - num_first) / (seconds - first_s)
        text += f" (first after {first_s * 1e3:.0f} ms, then {speed:.1f} tokens/s)"
    elif seconds > 0:
        text += f" ({generated / seconds:.1f} tokens/s)"
    note(text)


def _num_generated(outputs: "Sequence[RequestOutput]") -> int:
    return sum(len(s.token_ids) for o in outputs for s in o.outputs)
