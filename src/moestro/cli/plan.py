"""`moestro plan`: what a model takes and whether it fits, from config.json, in milliseconds."""

import argparse

from moestro.cli.console import add_common_flags, print_json, start_logging, write_text
from moestro.config import add_engine_flags, engine_config_from_args

HELP = "what a model takes and whether it fits this machine"
DESCRIPTION = (
    "Bytes of weights, KV cache and buffers, and what fits, computed from config.json without "
    "loading anything. Fails when the model does not fit, unless --fit is given."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro plan`."""
    add_engine_flags(parser, positional_model=True)
    parser.add_argument(
        "--fit",
        action="store_true",
        help="also say what all the memory would hold; a shortage is an answer, not an error",
    )
    add_common_flags(parser, json_help="print the plan as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from moestro.core.hardware import probe_cpu
    from moestro.core.model_config import load_model_spec
    from moestro.errors import CapacityError
    from moestro.planner.placement import fit_plan
    from moestro.planner.report import fit_lines, plan_lines
    from moestro.weights.source import resolve_model

    start_logging(args)
    config = engine_config_from_args(args)
    spec = load_model_spec(resolve_model(config.model, with_weights=False))
    report = fit_plan(config.model, spec, probe_cpu(), config)
    if report.shortage is not None and not args.fit:
        raise CapacityError(report.shortage)
    if args.json:
        facts = {
            "num_parameters": spec.num_parameters,
            "num_active_parameters": spec.num_active_parameters,
            "num_mtp_parameters": spec.num_mtp_parameters,
        }
        print_json({**report.to_dict(), **facts})
        return 0
    lines = fit_lines(report) if args.fit else plan_lines(report.plan)
    counts = f"{spec.num_parameters:,} parameters, {spec.num_active_parameters:,} active"
    if spec.num_mtp_parameters:
        counts += f"; {spec.num_mtp_parameters:,} more for MTP"
    write_text("\n".join([lines[0], counts, *lines[1:]]) + "\n")
    return 0
