"""`moestro bench`: measure this machine. One file a benchmark."""

import argparse
from types import ModuleType

from moestro.cli.bench import kernels, kv, ladder, machine, peers, throughput

HELP = "measure speed and memory"
DESCRIPTION = "Benchmarks. Each says what it measured on which machine, with which plan."

BENCHMARKS: tuple[ModuleType, ...] = (throughput, machine, kernels, peers, ladder, kv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each benchmark."""
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for module in BENCHMARKS:
        name = module.__name__.rpartition(".")[2]
        command = benchmarks.add_parser(
            name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False
        )
        module.add_arguments(command)
