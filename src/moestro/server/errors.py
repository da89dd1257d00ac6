"""Errors as vLLM shapes them: {"error": {"message", "type", "param", "code"}}, code = status."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from moestro.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    MoestroError,
    RequestError,
    UnsupportedError,
)

logger = logging.getLogger(__name__)

MAX_LISTED_ERRORS = 10
MAX_INPUT_CHARS = 200
CLIENT_CLOSED_REQUEST = 499

BAD_REQUEST = "BadRequestError"
NOT_FOUND = "NotFoundError"
INTERNAL = "InternalServerError"
UNAVAILABLE = "ServiceUnavailableError"


class ApiError(Exception):
    """An answer with an error body. `status` is also the body's code."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = BAD_REQUEST, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param


class ClientGoneError(Exception):
    """The client closed the connection; nobody reads the answer."""


def error_body(error: ApiError) -> dict[str, Any]:
    """The envelope, as vLLM's clients know it."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.status,
        }
    }


def encode_json(body: object) -> bytes:
    """UTF-8 JSON. What came in as unpaired surrogates leaves as escapes, never as a crash."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "backslashreplace"
    )


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The HTTP answer for an error."""
    return Response(
        encode_json(error_body(error)),
        status_code=error.status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def as_api_error(error: Exception) -> ApiError:
    """The answer for any exception; what nobody foresaw is logged and told without its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(str(error), param=error.param)
    if isinstance(error, CapacityError | ConfigError):
        return ApiError(str(error))
    if isinstance(error, UnsupportedError):
        return ApiError(str(error), status=501, kind="NotImplementedError")
    if isinstance(error, EngineDeadError | MoestroError):
        logger.error("request failed: %s", error)
    else:
        logger.error("unexpected error in a request", exc_info=error)
    return ApiError(sanitise(str(error) or type(error).__name__), status=500, kind=INTERNAL)


def sanitise(message: str) -> str:
    """A message without paths, addresses and tracebacks of this machine."""
    message = message.split("Traceback (most recent call last)")[0].strip()
    message = re.sub(r"0x[0-9a-fA-F]{4,}", "<address>", message)
    message = re.sub(r"(?<![\w<:/])/(?:[\w.\-]+/)+[\w.\-]*", "<path>", message)
    return message or "internal error"


def validation_api_error(error: ValidationError) -> ApiError:
    """A 400 that lists what is wrong, at most 10 entries, each input cut to 200 characters."""
    found = error.errors(include_url=False, include_context=False)
    lines = [f"{len(found)} validation error{'s' if len(found) != 1 else ''}:"]
    for item in found[:MAX_LISTED_ERRORS]:
        shown = {
            "type": item["type"],
            "loc": ("body", *item["loc"]),
            "msg": item["msg"],
            "input": _cut(item["input"]),
        }
        lines.append(f"  {shown}")
    if len(found) > MAX_LISTED_ERRORS:
        lines.append(f"...and {len(found) - MAX_LISTED_ERRORS} more errors")
    param = clean_path(found[0]["loc"]) if found else None
    return ApiError("\n".join(lines), kind=HTTPStatus.BAD_REQUEST.phrase, param=param or "body")


def clean_path(loc: Sequence[int | str]) -> str:
    """body.prompt, body.messages.0.role: names and numbers, without the branches of unions."""
    parts = [str(p) for p in loc if isinstance(p, int) or re.fullmatch(r"[a-z_][a-z0-9_]*", p)]
    if len(parts) > 1 and parts[-1] in ("str", "int", "float", "bool", "dict", "list"):
        parts.pop()
    return ".".join(["body", *parts])


def _cut(value: object) -> object:
    """The value itself when it is short, else the start of how it prints."""
    if isinstance(value, int | float | bool | None):
        return value
    text = value if isinstance(value, str) else repr(value)
    if len(text) <= MAX_INPUT_CHARS:
        return value
    return text[:MAX_INPUT_CHARS] + "..."


async def on_http_exception(_: Request, error: Exception) -> Response:
    """Unknown route, wrong method: the framework's words in the envelope."""
    assert isinstance(error, HTTPException)
    try:
        kind = HTTPStatus(error.status_code).phrase
    except ValueError:
        kind = "Error"
    wrapped = ApiError(str(error.detail), status=error.status_code, kind=kind)
    return error_response(wrapped, error.headers)


async def on_api_error(_: Request, error: Exception) -> Response:
    """Everything raised on purpose."""
    return error_response(as_api_error(error))


async def on_client_gone(_: Request, __: Exception) -> Response:
    """Nobody reads this; the status is for the log and the metrics."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def on_unexpected(_: Request, error: Exception) -> Response:
    """A bug: logged with its traceback, answered in the envelope."""
    return error_response(as_api_error(error))
