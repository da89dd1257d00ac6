"""Workload: what clients asked in a real trace, as sessions of requests without their text.

A trace names blocks of tokens; equal names mean equal tokens up to there. The token ids here are
made up from those names, so that prompts share exactly the prefixes that the real ones did.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from moestro.errors import ConfigError, shown

_WEKA_BLOCK = 64
_MOONCAKE_BLOCK = 512
_MAX_BLOCK = 1 << 16
_MAX_TOKENS = 1 << 24
_UNIQUE = 1 << 31
"""Token ids from here on name a request, not a block."""

_FILLER = tuple((at * 40_503 + 7) % 65_521 for at in range(_MAX_BLOCK))

BlockRange = tuple[int, int]
"""Block ids from the first to the last, both included."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    number: its place in the workload, unique. blocks: of its prompt, full ones only; the prompt's
    other tokens and its output are like no other request's. gap_s: from the answer before it in
    its session, or from the session's start.
    """

    number: int
    blocks: tuple[BlockRange, ...]
    input_len: int
    output_len: int
    gap_s: float

    @property
    def num_blocks(self) -> int:
        return sum(last - first + 1 for first, last in self.blocks)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other. Block ids mean the same in all sessions of one scope."""

    name: str
    scope: int
    requests: tuple[TracedRequest, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in the order in which they begin. has_sessions: the trace tells what follows what;
    otherwise each request is a session of its own."""

    name: str
    block_size: int
    has_sessions: bool
    sessions: tuple[Session, ...]

    @property
    def num_requests(self) -> int:
        return sum(len(session.requests) for session in self.sessions)

    def thinned(self, every: int) -> "Workload":
        """Every so many-th session: the same mix, and fewer of them."""
        return Workload(self.name, self.block_size, self.has_sessions, self.sessions[::every])

    def limited(self, max_requests: int | None, max_context: int | None) -> "Workload":
        """The first so many requests, of sessions in which none needs more tokens than that.

        The last session may be cut short.
        """
        left = self.num_requests if max_requests is None else max_requests
        kept = []
        for session in self.sessions:
            longest = max(r.input_len + r.output_len for r in session.requests)
            if left < 1:
                break
            if max_context is not None and longest > max_context:
                continue
            kept.append(Session(session.name, session.scope, session.requests[:left]))
            left -= len(session.requests)
        return Workload(self.name, self.block_size, self.has_sessions, tuple(kept))


class PromptWriter:
    """Makes the token ids of one session's prompts, each from the one before where they agree."""

    def __init__(self, scope: int, block_size: int) -> None:
        self._scope = scope
        self._size = block_size
        self._filler = _FILLER[: block_size - 2]
        self._tokens: list[int] = []
        self._blocks: tuple[BlockRange, ...] = ()

    def write(self, request: TracedRequest) -> tuple[int, ...]:
        """The prompt: a block begins with its scope and id, so that it is like no other block."""
        same = num_common_blocks(self._blocks, request.blocks)
        tokens, scope, filler = self._tokens, self._scope, self._filler
        del tokens[same * self._size :]
        for block in islice(_ids(request.blocks), same, None):
            tokens += (scope, block, *filler)
        self._blocks = request.blocks
        num_named = len(tokens)
        tokens += [unique_token(request.number)] * (request.input_len - num_named)
        prompt = tuple(tokens)
        del tokens[num_named:]
        return prompt


def unique_token(number: int) -> int:
    """What the tail and the output of a request consist of: found in no other request."""
    return _UNIQUE + number


def num_common_blocks(one: tuple[BlockRange, ...], other: tuple[BlockRange, ...]) -> int:
    """How many blocks both begin with."""
    same = 0
    for (first, last), (begin, end) in zip(one, other, strict=False):
        if first != begin:
            break
        same += min(last, end) - first + 1
        if last != end:
            break
    return same


def load_workload(path: Path) -> Workload:
    """Read a trace: JSON lines, plain or gzipped, of sessions (weka) or requests (mooncake).

    bench/traces/README.md has the formats. Raises ConfigError for anything else.
    """
    name = path.name.split(".")[0]
    lines = _read(path)
    try:
        where, first = next(lines)
    except StopIteration:
        raise ConfigError(f"The trace {path} is empty.") from None
    if "requests" in first:
        return _sessions(name, chain([(where, first)], lines))
    if "hash_ids" in first:
        return _single_requests(name, chain([(where, first)], lines))
    raise ConfigError(
        f"{where} is neither a session with requests nor a request with hash_ids: "
        f"its keys are {shown(sorted(first))}."
    )


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for at, line in enumerate(file, 1):
                if line.strip():
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ConfigError(f"Line {at} of {path} is not a JSON object.")
                    yield f"Line {at} of {path}", entry
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} can't be read: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"The trace {path} is not JSON lines: {error}.") from error


def _sessions(name: str, lines: Iterator[tuple[str, dict[str, Any]]]) -> Workload:
    sessions: list[Session] = []
    number = 0
    block_size = _WEKA_BLOCK
    for where, entry in lines:
        size = _whole(entry, "block_size", where, 2, _MAX_BLOCK)
        if sessions and size != block_size:
            raise ConfigError(f"{where} has blocks of {size} tokens, those before {block_size}.")
        block_size = size
        requests: list[TracedRequest] = []
        before = None
        for asked in _flat(entry.get("requests"), where):
            made = _session_request(asked, number, block_size, before, where)
            requests.append(made)
            number, before = number + 1, asked
        if requests:
            sessions.append(Session(str(entry.get("id", where)), len(sessions), tuple(requests)))
    return Workload(name, block_size, True, tuple(sessions))


def _flat(requests: Any, where: str) -> Iterator[dict[str, Any]]:
    """The requests of a session, those of a subagent in its place: the session waits for it."""
    if not isinstance(requests, list):
        raise ConfigError(f"{where} has no list of requests.")
    for request in requests:
        if not isinstance(request, dict):
            raise ConfigError(f"{where} has a request that is not an object: {shown(request)}.")
        if "requests" in request:
            yield from _flat(request["requests"], where)
        else:
            yield request


def _session_request(
    entry: dict[str, Any],
    number: int,
    block_size: int,
    before: dict[str, Any] | None,
    where: str,
) -> TracedRequest:
    input_len = _whole(entry, "in", where, 1, _MAX_TOKENS)
    ranges = entry.get("hash_ranges")
    if ranges is None:
        ranges = [[i, i] for i in entry.get("hash_ids", ())]
    blocks = _merged(ranges, where)
    if sum(last - first + 1 for first, last in blocks) * block_size > input_len:
        raise ConfigError(f"{where} has a request with more blocks than its {input_len} tokens.")
    output_len = max(1, _whole(entry, "out", where, 0, _MAX_TOKENS))
    return TracedRequest(number, blocks, input_len, output_len, _gap(entry, before, where))


def _gap(entry: dict[str, Any], before: dict[str, Any] | None, where: str) -> float:
    """think_time where the trace has it, else the time since the answer before."""
    if before is None:
        return 0.0
    if entry.get("think_time") is not None:
        return _seconds(entry, "think_time", where)
    started = _seconds(entry, "t", where)
    answered = _seconds(before, "t", where) + _seconds(before, "api_time", where)
    return max(0.0, started - answered)


def _single_requests(name: str, lines: Iterator[tuple[str, dict[str, Any]]]) -> Workload:
    sessions = []
    for number, (where, entry) in enumerate(lines):
        input_len = _whole(entry, "input_length", where, 1, _MAX_TOKENS)
        output_len = max(1, _whole(entry, "output_length", where, 0, _MAX_TOKENS))
        ids = entry.get("hash_ids", ())
        full = input_len // _MOONCAKE_BLOCK
        if not isinstance(ids, list) or len(ids) < full:
            raise ConfigError(f"{where} names fewer than the {full} full blocks of its prompt.")
        blocks = _merged([[i, i] for i in ids[:full]], where)
        request = TracedRequest(number, blocks, input_len, output_len, 0.0)
        sessions.append(Session(f"{name}-{number}", 0, (request,)))
    return Workload(name, _MOONCAKE_BLOCK, False, tuple(sessions))


def _merged(ranges: Any, where: str) -> tuple[BlockRange, ...]:
    """Ranges such that no two of them could be one."""
    merged: list[BlockRange] = []
    try:
        for first, last in ranges:
            whole = isinstance(first, int) and isinstance(last, int)
            if not (whole and 0 <= first <= last < _UNIQUE):
                raise ConfigError(f"{where} has the block range {shown([first, last])}.")
            if merged and merged[-1][1] + 1 == first:
                first = merged.pop()[0]
            merged.append((first, last))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} has block ids that are not whole numbers.") from error
    return tuple(merged)


def _ids(blocks: tuple[BlockRange, ...]) -> Iterator[int]:
    return chain.from_iterable(range(first, last + 1) for first, last in blocks)


def _whole(entry: dict[str, Any], key: str, where: str, low: int, high: int) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{where}: {key} must be in [{low}, {high}], got {shown(value)}.")
    return value


def _seconds(entry: dict[str, Any], key: str, where: str) -> float:
    value = entry.get(key) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ConfigError(f"{where}: {key} must be seconds, got {shown(value)}.")
    return float(value)
