"""Everything a user can get wrong ends in one of the package's errors, with a way out."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moestro import LLM, SamplingParams
from moestro.core.model_config import load_model_spec
from moestro.engine import build
from moestro.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    MoestroError,
    RequestError,
    UnsupportedError,
)
from moestro.weights.source import resolve_model

TINY = resolve_model("tiny-hy3")
MTP_LAYER = f"model.layers.{load_model_spec(TINY).num_hidden_layers}."
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": 20_000_000}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the bundled model to break."""
    for path in TINY.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_truncated_weights(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(str(checkpoint), **SMALL)


def test_corrupt_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\xff" * 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(str(checkpoint), **SMALL)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        LLM(str(checkpoint), **SMALL)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "llama"}, UnsupportedError, "llama"),
        ({"surprising_key": 1}, UnsupportedError, "surprising_key"),
        ({"num_attention_heads": 7}, CheckpointError, "7"),
        ({"hidden_size": 128}, CheckpointError, "128"),
        ({"num_experts_per_tok": 99}, CheckpointError, "99"),
    ],
)
def test_configs_that_can_not_be(
    checkpoint: Path, changes: dict[str, Any], error: type[MoestroError], words: str
) -> None:
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(error, match=words):
        LLM(str(checkpoint), **SMALL)


def test_an_eos_of_several_ids(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer_config.json", eos_token="<|the end|>")
    with pytest.raises(CheckpointError, match="not one token"):
        LLM(str(checkpoint), **SMALL)
    with LLM(str(checkpoint), skip_tokenizer_init=True, **SMALL) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1))


def test_no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        LLM(str(checkpoint), **SMALL)


def test_a_tokenizer_from_elsewhere(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    with LLM(str(checkpoint), tokenizer="tiny-hy3", **SMALL) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1))[0].finished
        conversation = [{"role": "user", "content": "x"}]
        template = "{{ bos_token }}{{ messages[0].content }}"
        chat = llm.chat(conversation, SamplingParams(max_tokens=1), chat_template=template)
        assert chat[0].prompt == "<|bos|>x"


def test_no_chat_template(checkpoint: Path) -> None:
    edit(checkpoint / "tokenizer_config.json", chat_template=None)
    with LLM(str(checkpoint), **SMALL) as llm:
        with pytest.raises(RequestError, match="--chat-template"):
            llm.chat([{"role": "user", "content": "x"}])
        assert llm.generate("x", SamplingParams(max_tokens=1))[0].finished


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tensor_parallel_size", 2),
        ("scheduling_policy", "deadline"),
    ],
)
def test_what_a_later_version_brings_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        LLM(**{option: value})


MTP = {"method": "mtp", "num_speculative_tokens": 2}


def change_mtp(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights as `change` leaves them."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_drafting_without_an_mtp_layer_is_refused(checkpoint: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(MTP_LAYER)]:
            del tensors[name]

    change_mtp(checkpoint, drop)
    with pytest.raises(ConfigError, match=r"promises 1, but the files hold none.*ngram"):
        LLM(str(checkpoint), speculative_config=MTP, **SMALL)
    edit(checkpoint / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=r"no MTP layer.*num_nextn_predict_layers.*ngram"):
        LLM(str(checkpoint), speculative_config=MTP, **SMALL)
    with LLM(str(checkpoint), **SMALL) as llm:
        assert llm.plan.num_mtp_layers == 0


def test_mtp_tensors_that_are_wrong_are_named_where_they_draft(checkpoint: Path) -> None:
    missing, misshapen = f"{MTP_LAYER}hnorm.weight", f"{MTP_LAYER}eh_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[missing]
        tensors[misshapen] = tensors[misshapen][:, 1:].contiguous()

    change_mtp(checkpoint, spoil)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(checkpoint), speculative_config=MTP, **SMALL)
    message = str(caught.value)
    hidden = json.loads((checkpoint / "config.json").read_text())["hidden_size"]
    assert missing in message
    shapes = f"[{hidden}, {2 * hidden - 1}], the config asks for [{hidden}, {2 * hidden}]"
    assert f"{misshapen} is {shapes}" in message
    with LLM(str(checkpoint), **SMALL) as llm:  # nobody reads them
        assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.parametrize("given", ["not json", "[]", {"method": "psychic"}, {"method": "mtp"}])
def test_a_speculative_config_that_says_nothing(given: Any) -> None:
    with pytest.raises(ConfigError, match="speculative_config"):
        LLM(speculative_config=given, **SMALL)


def test_a_memory_that_is_too_small_says_what_fits() -> None:
    with pytest.raises(CapacityError, match=r"What fits: .*max_model_len"):
        LLM(max_model_len=8192, kv_cache_memory_bytes=5_000_000, num_threads=1)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 4 bytes")]
)
def test_memory_that_the_system_refuses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(build, "KVPool", refuse)
    with pytest.raises(CapacityError, match=r"refused memory for tiny-hy3 .*kv_cache_memory"):
        LLM(**SMALL)


def test_other_errors_while_loading_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(build, "KVPool", fail)
    with pytest.raises(RuntimeError, match="something else"):
        LLM(**SMALL)


def test_a_prompt_beyond_the_memory() -> None:
    with LLM(kv_cache_memory_bytes=1_000_000, num_threads=1) as llm:
        held = llm.plan.max_context_tokens
        assert held < 512
        with pytest.raises(RequestError, match=f"{held} tokens"):
            llm.generate([[5] * held])
        longest = llm.generate([[5] * (held - 3)], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(longest[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", math.nan),
        ("n", 0),
        ("n", 10**6),
        ("seed", 2**65),
        ("stop", [""]),
        ("stop", 3),
        ("stop_token_ids", ["x"]),
        ("logprobs", -2),
        ("logprobs", 10**6),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {1: math.nan}),
        ("repetition_penalty", 0.0),
        ("min_tokens", 10**9),
    ],
)
def test_sampling_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_nul_bytes_and_odd_text_are_served() -> None:
    with LLM(**SMALL) as llm:
        prompts = ["a\0b", "\ufffd\ufffe\u202e", "\U0001f600" * 20, "\r\n\t \x1b[31m"]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=2))
        assert [o.prompt for o in outputs] == prompts
        for output in outputs:
            decoded = llm.get_tokenizer().decode(output.prompt_token_ids)
            assert decoded == output.prompt
