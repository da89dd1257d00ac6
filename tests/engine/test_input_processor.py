"""Everything a client can get wrong is refused with the limit and the field."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from moestro.core.kv_hints import KVHints
from moestro.core.sampling_params import SamplingParams
from moestro.engine.input_processor import (
    InputLimits,
    InputProcessor,
    RequestOptions,
    derive_seed,
)
from moestro.engine.tokenizer import Tokenizer
from moestro.errors import CheckpointError, RequestError
from moestro.weights.source import resolve_model

TOKENIZER = Tokenizer.load(resolve_model("tiny-hy3"))


def make(
    *,
    context: int = 100,
    kv_tokens: int = 1000,
    tokenizer: Tokenizer | None = TOKENIZER,
    policy: str = "priority",
) -> InputProcessor:
    limits = InputLimits(vocab_size=4096, max_model_len=context, kv_tokens=kv_tokens)
    defaults = SamplingParams(temperature=0.4)
    return InputProcessor(
        limits,
        tokenizer,
        eos_token_ids=[2, 9],
        engine_seed=5,
        default_params=defaults,
        scheduling_policy=policy,
    )


def refused(prompt: Any, params: Any = None, **options: Any) -> tuple[str, str | None]:
    """Message and param of the refusal."""
    processor = options.pop("processor", None) or make()
    with pytest.raises(RequestError) as error:
        processor.process(prompt, params, request_id="r", **options)
    return str(error.value), error.value.param


def test_all_shapes_of_a_prompt() -> None:
    ids = TOKENIZER.encode("x = 1")
    for prompt in ("x = 1", {"prompt": "x = 1"}, ids, tuple(ids), {"prompt_token_ids": ids}):
        assert make().process(prompt, request_id="r").prompt_token_ids == tuple(ids)
    both = make().process({"prompt": "shown", "prompt_token_ids": ids}, request_id="r")
    assert (both.prompt, both.prompt_token_ids) == ("shown", tuple(ids))
    bare = make().process("x = 1", request_id="r", add_special_tokens=False)
    assert bare.prompt_token_ids == tuple(ids[1:])


def test_defaults_and_stop_ids() -> None:
    request = make().process([5], request_id="r", options=RequestOptions(3, "s"))
    assert request.params == SamplingParams(temperature=0.4)
    assert request.stop_token_ids == request.eos_token_ids == {2, 9}
    assert (request.priority, request.cache_salt) == (3, "s")
    params = SamplingParams(ignore_eos=True, stop_token_ids=[7])
    request = make().process([5], params, request_id="r")
    assert (request.stop_token_ids, request.eos_token_ids) == ({7}, frozenset())


def test_a_tokenizer_of_another_model(caplog: pytest.LogCaptureFixture) -> None:
    limits = InputLimits(vocab_size=300, max_model_len=100, kv_tokens=100)
    processor = InputProcessor(limits, TOKENIZER, eos_token_ids=[2], engine_seed=5)
    assert "the tokenizer has 4096 tokens, the model 300" in caplog.text
    told = refused("import sys", processor=processor)
    assert "they don't belong together" in told[0]
    with pytest.raises(CheckpointError, match=r"\[300\] are not among the model's 300 tokens"):
        InputProcessor(limits, TOKENIZER, eos_token_ids=[2, 300], engine_seed=5)


def test_seeds_come_from_the_submission_number() -> None:
    first, second = make(), make()
    seeds = [first.process([5], request_id="r").seed for _ in range(3)]
    assert len(set(seeds)) == 3
    assert seeds == [second.process([5], request_id="q").seed for _ in range(3)]
    assert seeds[1] == derive_seed(5, 1) != derive_seed(6, 1)
    given = make().process([5], SamplingParams(seed=-1), request_id="r")
    assert given.seed == 2**64 - 1


def test_derived_seeds_do_not_change() -> None:
    assert derive_seed(0, 0) == 0xA706DD2F4D197E6F


@pytest.mark.parametrize(("asked", "given"), [(None, 97), (50, 50), (97, 97), (10**9, 97)])
def test_max_tokens_is_capped_by_the_context(asked: int | None, given: int) -> None:
    request = make().process([5, 6, 7], SamplingParams(max_tokens=asked), request_id="r")
    assert request.max_tokens == given


@pytest.mark.parametrize("name", ["request_id", "cache_salt"])
def test_names_are_text(name: str) -> None:
    """The scheduler would find out only when the request is in the engine, and end it."""
    wrong: Any = 5
    options = RequestOptions(cache_salt=wrong) if name == "cache_salt" else RequestOptions()
    request_id = wrong if name == "request_id" else "r"
    with pytest.raises(RequestError, match=f"{name} must be text, got 5") as error:
        make().process("x", request_id=request_id, options=options)
    assert error.value.param == name


def test_min_tokens_beyond_the_context_are_refused() -> None:
    params = SamplingParams(min_tokens=90, max_tokens=None)
    assert make().process([5] * 10, params, request_id="r").max_tokens == 90
    for max_tokens in (None, 10**9):
        message, param = refused([5] * 11, params.with_(max_tokens=max_tokens))
        assert param == "min_tokens"
        assert "min_tokens=90 is more than the 89 tokens" in message


def test_capping_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    processor = make()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            processor.process([5], SamplingParams(max_tokens=1000), request_id="r")
    assert [r.getMessage()[:34] for r in caplog.records] == ["max_tokens 1000 is capped to 99: t"]


def test_max_tokens_beyond_the_context_is_refused_when_strict() -> None:
    message, param = refused([5], SamplingParams(max_tokens=100), strict_max_tokens=True)
    assert param == "max_tokens"
    assert "maximum context length is 100" in message
    assert "for a total of 101 tokens" in message


def test_a_small_kv_memory_caps_too() -> None:
    processor = make(kv_tokens=64)
    request = processor.process([5], SamplingParams(max_tokens=None), request_id="r")
    assert request.max_tokens == 63


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ({"prompt_token_ids": []}, "prompt", "empty"),
        ([4096], "prompt", "Token id 4096 is out of vocabulary"),
        ([5, -1], "prompt", "Token id -1 is out of vocabulary"),
        ([5, "x"], "prompt", "'x' at position 1"),
        ([5, True], "prompt", "True at position 1"),
        ([1.5], "prompt", "1.5 at position 0"),
        (None, "prompt", "NoneType"),
        (b"x", "prompt", "bytes"),
        ({}, "prompt", "needs `prompt`"),
        ({"prompt": 3}, "prompt", "must be text"),
        ({"prompt_token_ids": "abc"}, "prompt", "str"),
        ("a\ud800", "prompt", "lone surrogate U+D800 at position 1"),
        ([5] * 100, "input_tokens", "leaves no room for an output token"),
        (
            [5] * 101,
            "input_tokens",
            "This model's maximum context length is 100 tokens. However, your prompt contains 101 "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce "
            "the length of the input prompt.",
        ),
    ],
)
def test_bad_prompts(prompt: Any, param: str, words: str) -> None:
    message, named = refused(prompt)
    assert named == param
    assert words in message


def test_a_prompt_beyond_the_kv_memory_names_it() -> None:
    message, param = refused([5] * 70, processor=make(kv_tokens=64))
    assert param == "input_tokens"
    assert "KV cache memory holds 64 tokens" in message
    assert "kv_cache_memory_bytes" in message


def test_millions_of_ids_are_refused_by_their_number() -> None:
    class Unread(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("read one by one")

    ids = Unread([5] * 1000)
    for prompt in (ids, {"prompt_token_ids": ids}):
        assert "1000 input tokens" in refused(prompt)[0]


def test_ten_megabytes_are_refused_before_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenised(*_: object) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode", tokenised)
    bound = 99 * 45
    message, param = refused("x" * 10_000_000)
    assert param == "input_text"
    assert (
        f"your prompt contains 10000000 characters (more than {bound} characters, which is the "
        "upper bound for 99 input tokens). Please reduce" in message
    )


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias", "[4096]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "[-1]"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "[5000]"),
    ],
)
def test_params_beyond_the_vocabulary(params: dict[str, Any], param: str, words: str) -> None:
    message, named = refused([5], SamplingParams(**params))
    assert named == param
    assert words in message


def test_params_of_another_type() -> None:
    message, param = refused([5], {"temperature": 0})
    assert param == "sampling_params"
    assert "dict" in message


def test_more_logprobs_than_tokens() -> None:
    limits = InputLimits(vocab_size=10, max_model_len=100, kv_tokens=100)
    processor = InputProcessor(limits, None, eos_token_ids=[], engine_seed=0)
    message, param = refused([5], SamplingParams(logprobs=11), processor=processor)
    assert param == "logprobs"
    assert "10 tokens" in message


def test_without_a_tokenizer_only_ids() -> None:
    processor = make(tokenizer=None)
    assert processor.process([5], request_id="r").prompt is None
    assert "skip_tokenizer_init" in refused("text", processor=processor)[0]
    message, param = refused([5], SamplingParams(stop=["x"]), processor=processor)
    assert param == "stop"
    assert "stop_token_ids" in message


@pytest.mark.parametrize("priority", [True, 1.5, "1", None])
def test_priorities_are_whole_numbers(priority: Any) -> None:
    message, param = refused([5], options=RequestOptions(priority))
    assert "must be an integer" in message
    assert param == "priority"


def test_hints_are_hints() -> None:
    wrong: Any = {"session_id": "s"}
    message, param = refused([5], options=RequestOptions(kv_hints=wrong))
    assert "kv_hints must be KVHints" in message
    assert param == "kv_hints"
    hints = KVHints(session_id="s")
    made = make().process([5], request_id="r", options=RequestOptions(kv_hints=hints))
    assert made.kv_hints is hints


def test_tokens_of_a_prompt_are_checked_as_a_request_is() -> None:
    text, ids = make().tokens_of("x = 1")
    assert (text, list(ids)) == ("x = 1", TOKENIZER.encode("x = 1"))
    for wrong, words in (([], "empty"), ([-1], "out of vocabulary"), ([5] * 101, "context")):
        with pytest.raises(RequestError, match=words):
            make().tokens_of(wrong)


def test_priority_needs_its_policy() -> None:
    message, param = refused([5], options=RequestOptions(3), processor=make(policy="fcfs"))
    assert "--scheduling-policy priority" in message
    assert param == "priority"
    assert make(policy="fcfs").process([5], request_id="r", options=RequestOptions(0)).priority == 0


def test_what_a_prompt_object_holds_beside_its_text_is_refused() -> None:
    message, param = refused({"prompt": "x", "multi_modal_data": {"image": 1}})
    assert "multi_modal_data" in message
    assert param == "prompt"
    ids = make().process({"prompt_token_ids": [5], "multi_modal_data": None}, request_id="r")
    assert ids.prompt_token_ids == (5,)
