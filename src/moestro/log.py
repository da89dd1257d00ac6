"""Log lines for the command line and the server: standard error only, one line each."""

import logging

from moestro import envs
from moestro.errors import ConfigError, shown

FORMAT = "%(levelname).1s %(asctime)s %(name)s: %(message)s"
PLAIN = "%(message)s"
TIME_FORMAT = "%H:%M:%S"
ROOT = "moestro"


class _StderrHandler(logging.StreamHandler):
    """Marks the handler set up here, so that a second set-up replaces it."""


def setup_logging(level: str | None = None, *, plain: bool = False) -> None:
    """Show Moestro's log lines of `level` and above (None: MOESTRO_LOG_LEVEL) on stderr.

    plain: the messages alone, for commands that a person watches.

    Only the `moestro` logger is touched: an application that embeds the engine keeps its own
    logging and need not call this. Calling again replaces level and stream. Raises ConfigError.
    """
    name = envs.LOG_LEVEL.get() if level is None else level.lower()
    if name not in envs.LOG_LEVELS:
        raise ConfigError(f"log level {shown(level)} is not one of {', '.join(envs.LOG_LEVELS)}.")
    logger = logging.getLogger(ROOT)
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(PLAIN if plain else FORMAT, TIME_FORMAT))
    logger.addHandler(handler)
    logger.setLevel(name.upper())
    logger.propagate = False
    for unknown in envs.unknown_names():
        logger.warning("environment variable %s is not known and has no effect", unknown)
