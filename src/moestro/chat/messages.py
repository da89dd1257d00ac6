"""Checking and normalising the messages of a conversation before a template sees them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moestro.errors import RequestError, shown

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as templates expect them: content one string, tool arguments as objects.

    Every other field (reasoning_content, tool_call_id, name, ...) is passed on as it is. Raises
    RequestError that names the message and what is wrong with it.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            f"messages must be a list of at least one message, got {messages!r:.80}.", "messages"
        )
    return [_check_message(m, n) for n, m in enumerate(messages)]


def _check_message(message: object, n: int) -> dict[str, Any]:
    where = f"messages[{n}]"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}.", where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}.", f"{where}.role"
        )
    checked = dict(message)
    has_other = role == "assistant" and any(
        message.get(k) for k in ("tool_calls", "reasoning", "reasoning_content")
    )
    checked["content"] = _check_content(message.get("content"), where, optional=has_other)
    if message.get("tool_calls"):
        checked["tool_calls"] = _check_tool_calls(message["tool_calls"], where)
    return checked


def _check_content(content: object, where: str, *, optional: bool) -> str | None:
    if isinstance(content, str) or (content is None and optional):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(p, f"{where}.content[{i}]") for i, p in enumerate(content))
    raise RequestError(
        f"{where}.content must be a string or a list of text parts, got {type(content).__name__}.",
        f"{where}.content",
    )


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        if part.get("type") in ("text", "input_text", "output_text") and isinstance(
            part.get("text"), str
        ):
            return str(part["text"])
        kind = part.get("type")
        raise RequestError(
            f"{where} has type {shown(kind)}: the models served here take text parts only.", where
        )
    raise RequestError(f"{where} must be a text part, got {type(part).__name__}.", where)


def _check_tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
    return [_check_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]


def _check_tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with a `function` object.", where)
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a string.", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str) or arguments is None:
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{where}.function.arguments must be JSON: {error}.", where
            ) from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be a JSON object.", where)
    return {**call, "function": {**function, "arguments": dict(arguments)}}
