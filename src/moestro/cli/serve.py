"""`moestro serve`: the HTTP server."""

import argparse
import os
import sys

from moestro.cli.console import add_common_flags, start_logging
from moestro.config import (
    add_engine_flags,
    add_server_flags,
    engine_config_from_args,
    server_config_from_args,
)

HELP = "serve OpenAI's API over HTTP"
DESCRIPTION = (
    "Serve /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and /version. "
    "SIGINT and SIGTERM finish running requests first; a second one stops at once."
)
EXIT_CUT_SHORT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moestro serve`."""
    add_engine_flags(parser, positional_model=True)
    add_server_flags(parser)
    add_common_flags(parser, log_level=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    options = server_config_from_args(args)
    config = engine_config_from_args(args)
    start_logging(args, options.log_level)

    from moestro import __version__
    from moestro.cli.loading_bar import loading_bar
    from moestro.server.listen import listen
    from moestro.server.serve import Server

    with listen(options.host, options.port) as sock:
        with loading_bar() as (progress, captured):
            server = Server.start(config, options, __version__, progress, captured)
        drained = server.run(sock, options.shutdown_timeout)
    if not drained:
        # The engine may be deep inside a step; waiting for it is what the user just refused.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CUT_SHORT)
    return 0
