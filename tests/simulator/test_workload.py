"""Traces: what is read from them, that equal blocks become equal tokens, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.simulator.workload import (
    BlockRange,
    PromptWriter,
    TracedRequest,
    load_workload,
    num_common_blocks,
)

TRACES = Path(__file__).parents[2] / "bench" / "traces"


def trace(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def session(*requests: dict, block_size: int = 64, name: str = "s") -> dict:
    return {"id": name, "block_size": block_size, "requests": list(requests)}


def asked(input_len: int, *ranges: list[int], **more: object) -> dict:
    return {"t": 0.0, "in": input_len, "out": 5, "hash_ranges": list(ranges), **more}


def test_committed_traces_are_whole() -> None:
    weka = load_workload(TRACES / "weka" / "claude_code_traces.rle.jsonl.gz")
    assert (len(weka.sessions), weka.num_requests, weka.block_size) == (692, 46_218, 64)
    prompts = [r.input_len for s in weka.sessions for r in s.requests]
    assert round(sum(prompts) / len(prompts)) == 118_296
    assert weka.has_sessions
    mooncake = load_workload(TRACES / "mooncake" / "conversation_trace.jsonl.gz")
    assert (mooncake.num_requests, mooncake.block_size) == (12_031, 512)
    assert not mooncake.has_sessions


def test_session_with_a_subagent_is_read_in_order(tmp_path: Path) -> None:
    agent = {"type": "subagent", "requests": [asked(130, [50, 51]), asked(200, [50, 52])]}
    path = trace(
        tmp_path / "t.jsonl",
        session(asked(100, [1, 1]), agent, asked(256, [1, 1], [9, 11], think_time=3.5)),
        session(asked(64, [1, 1]), name="other"),
    )
    workload = load_workload(path)
    first, second = workload.sessions
    assert [r.input_len for r in first.requests] == [100, 130, 200, 256]
    assert [r.number for r in first.requests] == [0, 1, 2, 3]
    assert first.requests[3].blocks == ((1, 1), (9, 11))
    assert first.requests[3].gap_s == 3.5
    assert second.scope != first.scope


def test_gap_without_think_time_is_since_the_answer(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.jsonl",
        session(asked(64, [1, 1], t=10.0, api_time=4.0), asked(64, [1, 1], t=20.0)),
    )
    assert [r.gap_s for r in load_workload(path).sessions[0].requests] == [0.0, 6.0]


def test_plain_lists_of_ids_become_ranges(tmp_path: Path) -> None:
    entry = {"t": 0.0, "in": 300, "out": 0, "hash_ids": [4, 5, 6, 9]}
    request = load_workload(trace(tmp_path / "t.jsonl", session(entry))).sessions[0].requests[0]
    assert request.blocks == ((4, 6), (9, 9))
    assert request.output_len == 1


def test_mooncake_leaves_the_partial_block_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(line))
    request = load_workload(path).sessions[0].requests[0]
    assert (request.blocks, request.num_blocks) == (((0, 1),), 2)


def test_limits(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.jsonl",
        session(asked(64, [1, 1]), asked(900, [1, 1])),
        session(asked(64, [1, 1]), asked(64, [1, 1]), asked(64, [1, 1])),
    )
    workload = load_workload(path)
    assert workload.limited(3, None).num_requests == 3
    assert [len(s.requests) for s in workload.limited(3, None).sessions] == [2, 1]
    assert [len(s.requests) for s in workload.limited(None, 900).sessions] == [3]
    assert [len(s.requests) for s in workload.thinned(2).sessions] == [2]
    assert workload.thinned(1) == workload


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4)).map(lambda p: (p[0], p[0] + p[1])), max_size=4
).map(tuple)


@given(st.lists(ranges, min_size=1, max_size=5))
def test_prompts_share_exactly_the_blocks_they_name(prompts: list[tuple[BlockRange, ...]]) -> None:
    size = 4
    writer = PromptWriter(7, size)
    written: list[tuple[TracedRequest, tuple[int, ...]]] = []
    for number, blocks in enumerate(prompts):
        request = TracedRequest(number, blocks, 3, 1, 0.0)
        length = request.num_blocks * size + 3
        request = TracedRequest(number, blocks, length, 1, 0.0)
        tokens = writer.write(request)
        assert len(tokens) == length
        assert tokens == PromptWriter(7, size).write(request)  # whatever was written before
        written.append((request, tokens))
    one, first = written[0]
    for other, second in written[1:]:
        ids = [[i for a, b in r.blocks for i in range(a, b + 1)] for r in (one, other)]
        same = next(
            (at for at, (x, y) in enumerate(zip(*ids, strict=False)) if x != y), min(map(len, ids))
        )
        assert first[: same * size] == second[: same * size]
        assert first[: (same + 1) * size] != second[: (same + 1) * size]


def test_scopes_share_nothing() -> None:
    request = TracedRequest(0, ((1, 2),), 128, 1, 0.0)
    assert PromptWriter(0, 64).write(request)[0] != PromptWriter(1, 64).write(request)[0]


def test_common_blocks_of_ranges() -> None:
    assert num_common_blocks(((1, 5), (9, 9)), ((1, 5), (9, 12))) == 6
    assert num_common_blocks(((1, 5),), ((1, 3), (9, 12))) == 3
    assert num_common_blocks(((1, 5),), ((2, 5),)) == 0
    assert num_common_blocks((), ((2, 5),)) == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([[1]], "not a JSON object"),
        ([{"prompt": "x"}], "neither a session"),
        ([session(asked(0, [1, 1]))], "in must be in"),
        ([session(asked(64, [1, 2]))], "more blocks than its 64 tokens"),
        ([session(asked(640, [3, 1]))], "block range"),
        ([session(asked(640, ["a", 1]))], "block range"),
        ([session(asked(640, [1]))], "not whole numbers"),
        ([session(asked(64), block_size=1)], "block_size must be in"),
        ([session(asked(64)), session(asked(64), block_size=128)], "blocks of 128 tokens"),
        ([session(asked(64), asked(64, think_time="long"))], "think_time must be seconds"),
        ([{"id": "s", "block_size": 64, "requests": 5}], "no list of requests"),
        ([{"id": "s", "block_size": 64, "requests": [5]}], "not an object"),
        ([{"input_length": 2000, "output_length": 1, "hash_ids": [1]}], "fewer than the 3 full"),
    ],
)
def test_refusals(tmp_path: Path, lines: list, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workload(trace(tmp_path / "t.jsonl", *lines))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        load_workload(tmp_path / "missing.jsonl")
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(gzip.compress(json.dumps(session(asked(64))).encode() + b"\n")[:-9])
    with pytest.raises(ConfigError, match="can't be read"):
        load_workload(torn)
    text = tmp_path / "text.jsonl"
    text.write_text("hello\n")
    with pytest.raises(ConfigError, match="not JSON lines"):
        load_workload(text)
