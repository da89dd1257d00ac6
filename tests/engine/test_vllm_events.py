"""vLLM's own classes read what is published: `pytest -m peers` with a Python that has vLLM."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moestro import envs
from moestro.core.kv_events import PagesRemoved, PagesStored
from moestro.engine.kv_event_publisher import event_maps

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

NAMES = (bytes(range(16)), bytes(range(16, 32)))
EVENTS = [
    PagesStored(NAMES, None, tuple(range(8)), 4, "device", "salt", "session"),
    PagesStored((b"\xff" * 16,), NAMES[1], (8, 9, 10, 11), 4, "host"),
    PagesRemoved((NAMES[0],), "store"),
]


def read_by_vllm(payload: bytes) -> dict[str, Any]:
    python = envs.PEERS_PYTHON.get()
    if python is None:
        pytest.fail("MOESTRO_PEERS_PYTHON names no Python")
    script = Path(__file__).with_name("vllm_events.py")
    done = subprocess.run([str(python), str(script)], input=payload, capture_output=True)
    if done.returncode == 3:
        pytest.skip(f"{python} has no vLLM")
    assert done.returncode == 0, done.stderr.decode()
    # libraries may greet on stdout before
    read: dict[str, Any] = json.loads(done.stdout[done.stdout.index(b'{"ts"') :])
    return read


def test_vllm_understands_every_event() -> None:
    maps = [*event_maps(EVENTS), {"type": "AllBlocksCleared"}]
    read = read_by_vllm(msgspec.msgpack.encode([12.5, maps, 1]))
    assert (read["ts"], read["rank"]) == (12.5, 1)
    first, second, removed, cleared = read["events"]
    assert first["type"] == second["type"] == "BlockStored"
    assert first["extra_keys"] == [["salt"], None]
    assert second["extra_keys"] == [None]
    assert (first["session_id"], second["session_id"]) == ("session", None)
    assert (first["medium"], second["medium"], removed["medium"]) == ("GPU", "CPU", "STORAGE")
    assert second["parent_block_hash"] == first["block_hashes"][1]
    assert removed["block_hashes"] == first["block_hashes"][:1]
    assert (removed["type"], cleared["type"]) == ("BlockRemoved", "AllBlocksCleared")
