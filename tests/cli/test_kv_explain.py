"""`moestro kv explain`: of a server, of a store, and of neither."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.cli.terminal import main

from moestro.engine.tokenizer import Tokenizer
from moestro.kvcache.identity import pack_tokens, page_hashes, root_hash
from moestro.kvstore import open_store
from moestro.weights.source import resolve_model

ANSWER = {
    "prompt_tokens": 1300,
    "cached_tokens": {"device": 1024, "host": 128, "store": 0},
    "miss_reason": "differs",
    "first_difference": 1160,
}
TEXT = "def quicksort(items):\n    return items\n" * 10
ONE, TWO = b"\x11" * 16, b"\x22" * 16


class Answering(BaseHTTPRequestHandler):
    """Answers every POST with `status` and `answer`, and keeps what it was asked."""

    status: ClassVar[int] = 200
    answer: ClassVar[Any] = ANSWER
    asked: ClassVar[list[tuple[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answering, "asked", [])
    with HTTPServer(("127.0.0.1", 0), Answering) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def explain(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["kv", "explain", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_a_server_is_asked(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = explain(capsys, server, "--prompt", "hello", "--cache-salt", "me")
    assert text.splitlines() == [
        "prompt  1,300 tokens",
        "device  1,024 tokens cached",
        "host    128 tokens cached",
        "store   0 tokens cached",
        "a cached prompt begins like it up to token 1,160",
    ]
    assert Answering.asked == [("/v1/kv/explain", {"prompt": "hello", "cache_salt": "me"})]
    assert json.loads(explain(capsys, f"{server}/v1/", "--prompt", "x", "--json")) == ANSWER


def test_messages_and_files(
    server: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "chat.json").write_text(json.dumps(messages))
    (tmp_path / "prompt.txt").write_text("long")
    explain(capsys, server, "--messages", str(tmp_path / "chat.json"))
    explain(capsys, server, "--prompt-file", str(tmp_path / "prompt.txt"))
    assert [body for _, body in Answering.asked] == [
        {"messages": messages, "cache_salt": ""},
        {"prompt": "long", "cache_salt": ""},
    ]


def test_what_a_server_refuses_is_told(
    server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "status", 400)
    monkeypatch.setattr(Answering, "answer", {"error": {"message": "The prompt is empty."}})
    assert "The prompt is empty." in explain(capsys, server, "--prompt", "", code=2)
    monkeypatch.setattr(Answering, "answer", "?")
    assert "answered 400" in explain(capsys, server, "--prompt", "", code=2)
    monkeypatch.setattr(Answering, "status", 200)
    assert "not answer as a Moestro server" in explain(capsys, server, "--prompt", "x", code=2)


def store_with(tmp_path: Path, num_pages: dict[bytes, int], salt: str = "") -> str:
    """A store that holds so many leading pages of TEXT in each namespace."""
    url = f"lmdb://{tmp_path}/kv"
    tokens = Tokenizer.load(resolve_model("tiny-hy3")).encode(TEXT)
    hashes = page_hashes(root_hash(b"", salt), pack_tokens(tokens), 16)
    for digest, count in num_pages.items():
        store = open_store(url, digest=digest, capacity_bytes=16 * 2**20)
        store.put_many([(h, b"x" * 1000) for h in hashes[:count]]).result(20)
        store.close(10)
    return url


def test_a_store_is_looked_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = store_with(tmp_path, {ONE: 2, TWO: 4})
    found = json.loads(explain(capsys, url, "--prompt", TEXT, "--page-size", "16", "--json"))
    assert found["namespaces"] == [
        {"namespace": TWO.hex(), "num_pages": 4, "cached_tokens": 64},
        {"namespace": ONE.hex(), "num_pages": 2, "cached_tokens": 32},
    ]
    assert found["num_whole_pages"] == (found["prompt_tokens"] - 1) // 16 > 4
    lines = explain(capsys, url, "--prompt", TEXT, "--page-size", "16").splitlines()
    assert lines[1] == f"{TWO.hex()}  4 pages, 64 tokens"
    assert lines[-1].startswith("page 4 (tokens 64 to 79) is in no namespace")
    other = explain(capsys, url, "--prompt", TEXT, "--page-size", "16", "--cache-salt", "me")
    assert f"{TWO.hex()}  0 pages" in other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9", "--prompt", "x"], "does not answer as a Moestro server does"),
        (["lmdb:///nowhere/at/all", "--prompt", "x"], "holds no store"),
        (["sqlite://x", "--prompt", "x"], "kv_store is 'sqlite://x'"),
        (["lmdb://x", "--prompt", "x", "--page-size", "7"], "--page-size is '7'"),
        (["http://x", "--prompt-file", "/nowhere"], "/nowhere can't be read"),
        (["http://x", "--messages", "pyproject.toml"], "can't be read"),
    ],
)
def test_bad_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in explain(capsys, *arguments, code=2)
