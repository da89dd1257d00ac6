"""Every error a user can meet. The message names the value, the limit and what to do."""

import re

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
    text = hide_passwords(text)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_PLACE = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])?(:\d{1,5})?(/\d*)?")


def without_password(url: str) -> str:
    """A store's URL as it may be shown: of one that could hold a password only its scheme, and the
    place behind the last @ where it is written as one. However malformed it is.

    A part that is no number where a port belongs may be a password whose host was forgotten.
    """
    scheme, mark, rest = url.partition(":")
    if scheme.lower() == "lmdb" or not (mark or "@" in url):
        return url  # a path
    shown_scheme = scheme if _SCHEME.fullmatch(scheme) else ""
    slashes = "//" if rest.startswith("//") else ""
    _, at, place = rest[len(slashes) :].rpartition("@")
    if not mark or not slashes:
        return f"{shown_scheme}{mark}***"
    place, question, _ = place.partition("?")
    if not _PLACE.fullmatch(place):
        return f"{shown_scheme}://***"
    return f"{shown_scheme}://{'***@' if at else ''}{place}{'?***' if question else ''}"


def hide_passwords(text: str) -> str:
    """Text somebody else wrote that may quote a URL: without what is before its @."""
    at, begin = text.rfind("@"), text.find("://")
    while begin >= 0 and text[:begin].endswith("lmdb"):
        begin = text.find("://", begin + 3)
    return f"{text[:begin]}://***{text[at:]}" if 0 <= begin < at else text
