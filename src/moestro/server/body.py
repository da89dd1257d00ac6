"""Reading a request body: size, content type, JSON, field names, field types, in that order."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError

from moestro.errors import RequestError, shown
from moestro.server.errors import ApiError, ClientGoneError, validation_api_error

M = TypeVar("M", bound=BaseModel)

JSON = "application/json"
_PATIENCE = 16
"""Bodies up to this many times the limit are read to their end before they are refused."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is known and not served: why, and the values that change nothing."""

    reason: str
    harmless: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldRules:
    """Names a body may hold beside its model's fields.

    ignored: accepted and without effect. refused: an error with a reason, unless the value is
    null or harmless. Every other name is an error.
    """

    ignored: frozenset[str] = frozenset()
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def apply(self, body: dict[str, Any], known: set[str]) -> dict[str, Any]:
        """The body without ignored and harmless fields. Raises RequestError by name."""
        kept = {}
        for name, value in body.items():
            if name in known:
                kept[name] = value
            elif name in self.refused:
                rule = self.refused[name]
                if value is not None and not any(_same(value, h) for h in rule.harmless):
                    raise RequestError(f"{name} is not supported: {rule.reason}", name)
            elif name not in self.ignored:
                raise RequestError(self._unknown(name, known), name)
        return kept

    def _unknown(self, name: str, known: set[str]) -> str:
        near = difflib.get_close_matches(name[:100], sorted(known), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " Remove it."
        return f"Unknown field {shown(name)}.{hint}"


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError when it is over the limit, ClientGoneError.

    What is over the limit is taken in and dropped, within reason: a client that is still sending
    when the connection closes never reads the answer.
    """
    if _declared_bytes(request) > limit_bytes * (1 if "expect" in request.headers else _PATIENCE):
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= limit_bytes * _PATIENCE:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size <= limit_bytes:
            parts.append(part)
        else:
            parts.clear()
        more = message.get("more_body", False)
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    return b"".join(parts)


def _declared_bytes(request: Request) -> int:
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isascii() and declared.isdigit() else 0


async def parse_body(request: Request, model: type[M], rules: FieldRules, limit_bytes: int) -> M:
    """The request as `model`. Raises ApiError, RequestError or ClientGoneError."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
        raise ApiError(
            "Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )
    raw = await read_body(request, limit_bytes)
    try:
        body = pydantic_core.from_json(raw, allow_inf_nan=True)
    except ValueError as error:
        raise ApiError(
            f"The body is not valid JSON: {error}", kind="Bad Request", param="body"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(
            f"The body must be a JSON object, got {_json_type(body)}.",
            kind="Bad Request",
            param="body",
        )
    kept = rules.apply(body, set(model.model_fields))
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise validation_api_error(error) from None


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(
        f"The request body is larger than the limit of {limit_bytes} bytes.",
        status=413,
        kind="Request Entity Too Large",
    )


def _same(value: object, other: object) -> bool:
    """Equal and of one type: False is not 0 here."""
    return type(value) is type(other) and value == other


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, list):
        return "an array"
    return "a string" if isinstance(value, str) else "a number"
