"""`moestro bench`: measure this machine. One file a benchmark."""

import argparse
from types import ModuleType

from moestro.cli.bench import kernels, kv, ladder, machine, peers, throughput
from moestro.cli.parser import add_subcommands

HELP = "measure speed and memory"
DESCRIPTION = "Benchmarks. Each says what it measured on which machine, with which plan."

BENCHMARKS: tuple[ModuleType, ...] = (throughput, machine, kernels, peers, ladder, kv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand for each benchmark."""
    add_subcommands(parser, BENCHMARKS, dest="benchmark", metavar="BENCHMARK")
