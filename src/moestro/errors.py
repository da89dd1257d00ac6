"""Every error a user can meet. The message names the value, the limit and what to do."""

MAX_SHOWN_CHARS = 200


class MoestroError(Exception):
    """Root of all errors raised on purpose; the CLI prints these without a traceback."""


class ConfigError(MoestroError):
    """An option, a configuration file or an environment variable is wrong."""


class CheckpointError(MoestroError):
    """A checkpoint (config.json, weights, tokenizer files) can't be used as it is."""


class UnsupportedError(MoestroError):
    """Something valid that this build does not do: an op without a body, a feature not filled."""


class CapacityError(MoestroError):
    """It does not fit: the message says what would."""


class RequestError(MoestroError):
    """A request is wrong. `param` names the offending field, as in the API's error envelope."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class GenerationError(MoestroError):
    """A sequence could not be generated to its end; the engine lives."""


class EngineDeadError(MoestroError):
    """The engine loop has stopped; the cause is chained."""


def shown(value: object) -> str:
    """How a message shows a value somebody else wrote: its repr, cut to MAX_SHOWN_CHARS."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python prints, a list in itself
        return f"<{type(value).__name__} too large to show>"
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
