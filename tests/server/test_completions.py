"""/v1/completions over an engine whose tokens are known."""

import pytest
from tests.server.client import events_of, make_context, metric, post
from tests.server.fake_engine import FakeEngine

PATH = "/v1/completions"


def test_whole_answer() -> None:
    context = make_context(FakeEngine())
    response = post(context, PATH, {"model": "tiny", "prompt": "abc", "max_tokens": 4})
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "defg",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_default_is_sixteen_tokens() -> None:
    engine = FakeEngine()
    body = post(make_context(engine), PATH, {"prompt": "abc"}).json()
    assert engine.calls[0].params.max_tokens == 16
    assert body["usage"]["completion_tokens"] == 16


def test_unset_max_tokens_is_the_checkpoints() -> None:
    engine = FakeEngine()
    context = make_context(engine, default_max_tokens=7)
    post(context, PATH, {"prompt": "abc"})
    post(context, PATH, {"prompt": "abc", "max_tokens": 9})
    assert [c.params.max_tokens for c in engine.calls] == [7, 9]
    assert [c.options["strict_max_tokens"] for c in engine.calls] == [False, True]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["de"]),
        (["abc", "x"], ["de", "yz"]),
        ([0, 1, 2], ["de"]),
        ([[0, 1, 2], [23]], ["de", "yz"]),
    ],
)
def test_every_shape_of_prompt(prompt: object, texts: list[str]) -> None:
    body = post(make_context(FakeEngine()), PATH, {"prompt": prompt, "max_tokens": 2}).json()
    assert [c["text"] for c in body["choices"]] == texts
    assert [c["index"] for c in body["choices"]] == list(range(len(texts)))


def test_n_of_several_prompts_is_numbered_through() -> None:
    body = post(
        make_context(FakeEngine()), PATH, {"prompt": ["abc", "x"], "max_tokens": 2, "n": 2}
    ).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "de"),
        (1, "ef"),
        (2, "yz"),
        (3, "za"),
    ]
    assert body["usage"]["completion_tokens"] == 8
    assert body["usage"]["prompt_tokens"] == 4


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "mno"]])
def test_stream_says_what_the_whole_answer_says(prompt: object, n: int) -> None:
    asked = {"prompt": prompt, "max_tokens": 5, "n": n, "logprobs": 2, "echo": True}
    whole = post(make_context(FakeEngine()), PATH, asked).json()
    context = make_context(FakeEngine())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = post(context, PATH, asked | options)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events_of(response.text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    for choice in whole["choices"]:
        parts = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert "".join(p["text"] for p in parts) == choice["text"]
        assert [p["finish_reason"] for p in parts][-1] == choice["finish_reason"]
        assert all(p["finish_reason"] is None for p in parts[:-1])
        for key, value in choice["logprobs"].items():
            assert [x for p in parts for x in p["logprobs"][key]] == value


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abc", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, done = events_of(post(make_context(FakeEngine()), PATH, body).text)
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    assert done == "[DONE]"


def test_stream_without_usage_has_none() -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream": True}
    *chunks, _ = events_of(post(make_context(FakeEngine()), PATH, body).text)
    assert len(chunks) == 3
    assert all("usage" not in c for c in chunks)


def test_logprobs() -> None:
    body = {"prompt": "abc", "max_tokens": 2, "logprobs": 2}
    told = post(make_context(FakeEngine()), PATH, body).json()["choices"][0]["logprobs"]
    assert told["tokens"] == ["d", "e"]
    assert told["token_logprobs"] == [-3.0, -3.0]
    assert told["text_offset"] == [0, 1]
    assert told["top_logprobs"][0] == {"x": -1.0, "y": -2.0, "d": -3.0}


def test_echo_with_logprobs_covers_the_prompt() -> None:
    body = {"prompt": "abc", "max_tokens": 1, "logprobs": 1, "echo": True}
    choice = post(make_context(FakeEngine()), PATH, body).json()["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -3.0, -3.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


def test_echo_of_token_ids_is_decoded() -> None:
    body = {"prompt": [0, 1], "max_tokens": 1, "echo": True}
    assert post(make_context(FakeEngine()), PATH, body).json()["choices"][0]["text"] == "abc"


def test_prompt_logprobs_and_token_ids_on_request() -> None:
    body = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    choice = post(make_context(FakeEngine()), PATH, body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"1": {"logprob": -3.0, "rank": 3, "decoded_token": "b"}},
        {"2": {"logprob": -3.0, "rank": 3, "decoded_token": "c"}},
    ]
    assert choice["token_ids"] == [3]
    assert choice["prompt_token_ids"] == [0, 1, 2]


def test_sampling_fields_reach_the_engine() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 42,
        "stop": ["x", "y"],
        "stop_token_ids": [1, 2],
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "n": 2,
    }
    engine = FakeEngine()
    extras = {"logit_bias": {"5": -1, "6": 2.5}, "cache_salt": "me", "add_special_tokens": False}
    assert post(make_context(engine), PATH, {"prompt": "a", **fields, **extras}).status_code == 200
    params = engine.calls[0].params
    for name, value in fields.items():
        got = getattr(params, name)
        assert (list(got) if isinstance(got, tuple) else got) == value, name
    assert params.logit_bias == ((5, -1.0), (6, 2.5))
    options = engine.calls[0].options
    assert options["cache_salt"] == "me"
    assert options["add_special_tokens"] is False
    assert options["strict_max_tokens"] is True


@pytest.mark.parametrize(("limits", "strict"), [({}, False), ({"max_tokens": 5}, True)])
def test_only_a_limit_that_was_asked_for_is_strict(limits: dict[str, int], strict: bool) -> None:
    engine = FakeEngine()
    post(make_context(engine), PATH, {"prompt": "a", **limits})
    assert engine.calls[0].options["strict_max_tokens"] is strict
    messages = [{"role": "user", "content": "a"}]
    post(make_context(engine), "/v1/chat/completions", {"messages": messages, **limits})
    assert engine.calls[1].options["strict_max_tokens"] is strict


def test_unset_fields_take_the_models_defaults() -> None:
    engine = FakeEngine()
    defaults = make_context(engine).model.default_params.with_(temperature=0.7, top_k=20)
    context = make_context(engine, default_params=defaults)
    post(context, PATH, {"prompt": "a", "top_k": 3, "temperature": None})
    assert engine.calls[0].params.temperature == 0.7
    assert engine.calls[0].params.top_k == 3


def test_ids_are_the_clients_own_and_stay_apart_in_the_engine() -> None:
    engine = FakeEngine()
    context = make_context(engine)
    for _ in range(2):
        body = {"prompt": "a", "max_tokens": 1, "request_id": "mine"}
        assert post(context, PATH, body).json()["id"] == "cmpl-mine"
    first, second = (c.request_id for c in engine.calls)
    assert first.startswith("cmpl-mine")
    assert second.startswith("cmpl-mine")
    assert first != second


def test_priority_reaches_the_engine() -> None:
    engine = FakeEngine()
    assert post(make_context(engine), PATH, {"prompt": "a", "priority": 3}).status_code == 200
    assert engine.calls[-1].options["priority"] == 3


def test_metrics_of_a_request() -> None:
    context = make_context(FakeEngine())
    post(context, PATH, {"prompt": "abc", "max_tokens": 4, "n": 2})
    labels = '{engine="0",model_name="tiny"}'
    assert metric(context, f"vllm:request_prompt_tokens_sum{labels}") == 3
    assert metric(context, f"vllm:request_generation_tokens_sum{labels}") == 8
    assert metric(context, f"vllm:request_params_n_sum{labels}") == 2
    assert metric(context, f"vllm:request_params_max_tokens_sum{labels}") == 4
    assert metric(context, f"vllm:time_to_first_token_seconds_count{labels}") == 1
    assert metric(context, f"vllm:inter_token_latency_seconds_count{labels}") == 6
    assert metric(context, f"vllm:e2e_request_latency_seconds_count{labels}") == 1
    reason = '{engine="0",finished_reason="length",model_name="tiny"}'
    assert metric(context, f"vllm:request_success_total{reason}") == 2
