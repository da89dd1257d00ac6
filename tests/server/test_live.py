"""A real server with the model that ships, seen by OpenAI's own client."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from tests.cli.terminal import moestro
from tests.server.live_server import SMALL, LiveServer, live_server

from moestro import LLM, SamplingParams

PROMPT = "def quicksort(items):"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--served-model-name", "tiny", "second") as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-hy3", kv_cache_memory_bytes=2**26, num_threads=1) as made:
        yield made


def test_served_equals_offline(client: openai.OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=2)
    offline = llm.generate(PROMPT, params)[0].outputs[0]
    served = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24, logprobs=2
    )
    choice = served.choices[0]
    assert choice.text == offline.text
    assert choice.logprobs is not None
    assert offline.logprobs is not None
    wanted = [p[i].logprob for p, i in zip(offline.logprobs, offline.token_ids, strict=True)]
    assert choice.logprobs.token_logprobs == wanted
    assert served.usage is not None
    assert served.usage.completion_tokens == len(offline.token_ids)
    streamed = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0.8, seed=7, max_tokens=24, stream=True
    )
    assert "".join(c.choices[0].text for c in streamed) == offline.text


def test_token_ids_and_echo(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(PROMPT)
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=4, temperature=0, echo=True, logprobs=0
    )
    choice = answer.choices[0]
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens[: len(ids)]) == "<|bos|>" + PROMPT
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == len(ids) + 4


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "sort a list"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=3)
    assert [c.index for c in whole.choices] == [0, 1]
    assert whole.choices[0].message.content == whole.choices[1].message.content
    assert whole.choices[0].logprobs is not None
    first = whole.choices[0].logprobs.content[0]
    assert first.logprob == max(t.logprob for t in first.top_logprobs)
    assert len(first.top_logprobs) == 3
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    *chunks, usage = stream
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 12


def test_stop_strings(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=30, temperature=0)
    text = free.choices[0].text
    stop = text[10:13]
    cut = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=30, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].model_extra is not None
    assert cut.choices[0].model_extra["stop_reason"] == stop


def test_vllm_fields_through_extra_body(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="second",
        prompt=PROMPT,
        max_tokens=6,
        extra_body={"top_k": 1, "min_tokens": 6, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.model == "second"
    assert answer.choices[0].model_extra is not None
    assert len(answer.choices[0].model_extra["token_ids"]) == 6


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature must be in"):
        client.completions.create(model="tiny", prompt="a", temperature=5)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="a b " * 10_000)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="a", max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="The prompt is empty"):
        client.completions.create(model="tiny", prompt="")
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        client.completions.create(model="tiny", prompt=[10**6])
    with pytest.raises(openai.BadRequestError, match="characters"):
        client.completions.create(model="tiny", prompt="x" * 10_000_000)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "second"]
    assert client.models.retrieve("tiny").owned_by == "moestro"


def test_metrics_move(server: LiveServer, client: openai.OpenAI) -> None:
    def sample(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    phases = [
        f"vllm:request_{p}_time_seconds_count" for p in ("queue", "prefill", "decode", "inference")
    ]
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", *phases)
    before = {n: sample(n) for n in names}
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    assert sample("vllm:generation_tokens_total") - before["vllm:generation_tokens_total"] == 9
    assert sample("vllm:prompt_tokens_total") > before["vllm:prompt_tokens_total"]
    assert [sample(n) - before[n] for n in phases] == [1, 1, 1, 1]
    assert sample("vllm:cache_config_info") == 1


def test_a_session_over_http(server: LiveServer) -> None:
    def post(path: str, **body: object) -> dict[str, Any]:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    prompt = [5 + i % 300 for i in range(200)]
    before = time.time()
    done = post(
        "/v1/completions",
        prompt=prompt,
        max_tokens=2,
        kv_hints={"session_id": "agent", "pin_ttl_s": 60},
        include_timing=True,
    )
    assert (done["kv_hints"]["accepted"], done["kv_hints"]["refused"]) == (192, None)
    assert before < done["kv_hints"]["expires_at"] < time.time() + 60
    timing = done["timing"]
    assert timing["first_token_s"] == pytest.approx(timing["queue_s"] + timing["prefill_s"])
    assert timing["miss_reason"] in ("no_prefix", "differs")
    found = post("/v1/kv/explain", prompt_token_ids=prompt)
    assert (found["cached_tokens"]["device"], found["miss_reason"]) == (192, None)
    pinned = post("/v1/kv/pin", session_id="agent", ttl_s=5)
    assert (pinned["accepted"], pinned["refused"]) == (192, None)
    assert post("/v1/kv/pin", session_id="agent", ttl_s=5, cache_salt="x")["accepted"] == 0
    text = httpx.get(f"{server.url}/metrics").text
    for line in (
        'moestro:kv_pins{engine="0",model_name="tiny"} 1.0',
        'moestro:kv_sessions{engine="0",model_name="tiny"} 1.0',
        'moestro:kv_hints_total{action="pin",engine="0",model_name="tiny",outcome="accepted"} 2.0',
    ):
        assert line in text
    assert post("/v1/kv/drop", session_id="agent")["refused"] is None


def test_a_disconnect_frees_the_engine(server: LiveServer) -> None:
    address = urlsplit(server.url)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True, "stream": True})
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port), timeout=60) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        assert b"200 OK" in sock.recv(100)
    running = 'vllm:num_requests_running{engine="0",model_name="tiny"} '
    aborted = "moestro:client_disconnects_total"
    for _ in range(600):
        text = httpx.get(f"{server.url}/metrics").text
        gone = any(
            line.startswith(aborted) and not line.endswith(" 0.0") for line in text.splitlines()
        )
        if gone and running + "0.0" in text:
            return
        time.sleep(0.05)
    raise AssertionError(text)


def test_sigterm_finishes_what_runs_and_then_ends() -> None:
    with live_server() as server:
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        received: list[str] = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                received.append(line)
                if len(received) == 3:
                    server.signal(signal.SIGTERM)
        events = [line for line in received if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert not any("Traceback" in line for line in server.log)


ENDLESS = {"prompt": PROMPT, "max_tokens": 7000, "ignore_eos": True, "stream": True}


CUT_SHORT = {
    "error": {
        "message": "The server is shutting down.",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}


def cut_stream(server: LiveServer, *signals: signal.Signals) -> list[str]:
    """The events of an endless stream whose server is told to stop after the first one."""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS) as response:
        lines = response.iter_lines()
        next(lines)
        send_signals(server, *signals)
        return [line for line in lines if line]


def send_signals(server: LiveServer, *signals: signal.Signals) -> None:
    """Half a second apart: the kernel merges equal signals that nobody has seen yet."""
    for delay, number in enumerate(signals):
        threading.Timer(0.5 * delay, server.signal, [number]).start()


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_a_stream_that_does_not_finish_in_time_ends_with_an_error(seconds: str) -> None:
    with live_server("--shutdown-timeout", seconds) as server:
        events = cut_stream(server, signal.SIGTERM)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:]) == CUT_SHORT
        assert server.wait() == 0
        assert not any("Traceback" in line for line in server.log)


def test_a_second_signal_cuts_a_stream() -> None:
    with live_server("--shutdown-timeout", "100") as server:
        events = cut_stream(server, signal.SIGINT, signal.SIGINT)
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:]) == CUT_SHORT
        assert server.wait() == 1
        assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize(
    ("seconds", "signals", "code"),
    [("0", [signal.SIGTERM], 0), ("100", [signal.SIGTERM, signal.SIGTERM], 1)],
)
def test_a_whole_answer_that_is_cut_short_is_a_503(
    seconds: str, signals: list[signal.Signals], code: int
) -> None:
    with live_server("--shutdown-timeout", seconds) as server:
        threading.Timer(1.0, send_signals, [server, *signals]).start()
        body = ENDLESS | {"stream": False}
        response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 503
        assert response.json() == CUT_SHORT
        assert server.wait() == code
        assert not any("Traceback" in line for line in server.log)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_reads_that_it_serves_may_stop_it(number: signal.Signals) -> None:
    with live_server() as server:
        server.signal(number)
        assert server.wait() == 0


def test_port_in_use_is_told_before_the_model_loads(server: LiveServer) -> None:
    port = str(urlsplit(server.url).port)
    done = moestro("serve", "--port", port, *SMALL)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}: the port is in use" in done.stderr


def test_two_servers_on_one_machine(server: LiveServer, tmp_path: Path) -> None:
    config = tmp_path / "second.yaml"
    config.write_text("model: tiny-hy3\nserved-model-name: other\nmax-model-len: 512\n")
    with live_server("--config", str(config)) as other:
        for url, name in ((server.url, "tiny"), (other.url, "other")):
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == name
        assert httpx.get(f"{other.url}/v1/models").json()["data"][0]["max_model_len"] == 512
        other.signal(signal.SIGINT)
        assert other.wait() == 0
        assert httpx.get(f"{server.url}/health").status_code == 200
