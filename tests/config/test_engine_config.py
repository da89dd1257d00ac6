"""EngineConfig from Python and YAML: one meaning, loud about everything that is wrong."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from moestro.config import EngineConfig
from moestro.config.knob import knobs_of
from moestro.config.vllm_names import FOREIGN_NAMES
from moestro.errors import ConfigError

# The list of options the design promises, with their defaults.
PROMISED = {
    "model": "tiny-hy3",
    "tokenizer": None,
    "skip_tokenizer_init": False,
    "chat_template": None,
    "generation_config": "auto",
    "dtype": "auto",
    "quantization": "none",
    "quantization_group_size": 32,
    "max_model_len": None,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "page_size": 64,
    "kv_cache_dtype": "auto",
    "kv_hadamard": False,
    "kv_cache_memory_bytes": None,
    "enable_prefix_caching": True,
    "num_threads": 0,
    "enforce_eager": False,
    "seed": 0,
    "scheduling_policy": "fcfs",
    "async_scheduling": False,
    "speculative_config": None,
    "host_kv_bytes": 0,
    "host_kv_dtype": "auto",
    "kv_store": "none",
    "kv_store_bytes": 16 * 2**30,
    "kv_store_sync": "batch",
    "kv_store_timeout_s": 2.0,
    "kv_write_policy": "write_through",
    "kv_selective_hits": 2,
    "kv_background_bytes_per_s": 256 * 2**20,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "enable_eplb": False,
    "prefill_parallel_config": None,
    "decode_parallel_config": None,
    "fast_collectives": False,
    "cache_dir": None,
    "weight_cache": "auto",
    "weight_cache_bytes": 64 * 2**30,
}


def test_every_promised_option_is_there_with_its_default() -> None:
    config = EngineConfig()
    assert {name: getattr(config, name) for name in PROMISED} == PROMISED


def test_every_option_has_help_and_a_limit() -> None:
    for described, option in knobs_of(EngineConfig).values():
        assert option.help
        assert option.kind.expects
        assert described.default in option.ready or option.waits_for is None


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 1  # type: ignore[misc]


def test_values_are_normalised_however_they_come() -> None:
    config = EngineConfig.from_kwargs(
        max_model_len="32k", kv_cache_memory_bytes="4GiB", dtype="half", page_size="16"
    )
    assert config.max_model_len == 32000
    assert config.kv_cache_memory_bytes == 2**32
    assert config.dtype == "float16"
    assert config.page_size == 16
    direct = EngineConfig(
        max_model_len=32000, kv_cache_memory_bytes=2**32, dtype="float16", page_size=16
    )
    assert config == direct


def test_none_means_the_default() -> None:
    nothing = {f.name: None for f in fields(EngineConfig)}
    assert EngineConfig.from_kwargs(**nothing) == EngineConfig()


# --- vLLM's names ------------------------------------------------------------------------------


def test_vllm_aliases() -> None:
    assert EngineConfig.from_kwargs(block_size=16).page_size == 16
    assert EngineConfig.from_kwargs(gpu_memory_utilization=0.5).gpu_memory_utilization == 0.5
    assert EngineConfig.from_kwargs(device_memory_utilization=0.5).gpu_memory_utilization == 0.5
    assert EngineConfig.from_kwargs(max_model_len="auto").max_model_len is None
    assert EngineConfig.from_kwargs(max_model_len=-1).max_model_len is None
    assert EngineConfig.from_kwargs(generation_config="vllm").generation_config == "none"
    assert EngineConfig.from_kwargs(quantization=None).quantization == "none"
    assert EngineConfig.from_kwargs(block_size=16, page_size=16).page_size == 16


def test_one_option_under_two_names_must_agree() -> None:
    with pytest.raises(ConfigError, match="block_size=16 and page_size=32 are the same option"):
        EngineConfig.from_kwargs(block_size=16, page_size=32)


def test_what_vllm_scripts_pass_and_means_nothing_here() -> None:
    config = EngineConfig.from_kwargs(
        trust_remote_code=False,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enforce_eager=True,
        disable_log_stats=True,
        enable_chunked_prefill=True,
        swap_space=0,
        tokenizer_mode="auto",
        load_format="auto",
        revision=None,
        hf_overrides={},
    )
    assert config == EngineConfig(enforce_eager=True)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("trust_remote_code", True, "never run"),
        ("pipeline_parallel_size", 2, "tensor, data or expert"),
        ("enable_chunked_prefill", False, "max_num_batched_tokens"),
        ("hf_overrides", {"a": 1}, "config.json"),
        ("load_format", "gguf", "safetensors"),
        ("enable_lora", True, "merge"),
        ("cpu_offload_gb", 10, "one device"),
        ("revision", "abc123", "folder"),
    ],
)
def test_vllm_keywords_without_an_equivalent_say_why(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{name: value})
    message = str(caught.value)
    assert f"{name}={value!r}" in message
    assert "no equivalent" in message
    assert reason in message


def test_no_name_is_both_an_option_and_foreign() -> None:
    known = {also for _, option in knobs_of(EngineConfig).values() for also in option.also}
    assert not (known | set(knobs_of(EngineConfig))) & set(FOREIGN_NAMES)


# --- what later versions fill ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling_policy", "deadline"),
        ("tensor_parallel_size", 2),
        ("data_parallel_size", 2),
        ("enable_expert_parallel", True),
        ("enable_eplb", True),
        ("prefill_parallel_config", {"world_size": 2}),
        ("decode_parallel_config", {"world_size": 2}),
        ("fast_collectives", True),
    ],
)
def test_what_comes_later_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}=")
    assert "not available in this version" in message
    _, option = knobs_of(EngineConfig)[name]
    assert option.waits_for is not None
    assert option.waits_for in message
    default = PROMISED[name]
    assert EngineConfig.from_kwargs(**{name: default}) == EngineConfig()


# --- wrong values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_num_seqs", 0, "from 1 to 65,536"),
        ("max_num_seqs", -1, "from 1 to 65,536"),
        ("max_num_seqs", "many", "whole number"),
        ("max_num_batched_tokens", 0, "from 1"),
        ("max_num_batched_tokens", float("nan"), "whole number"),
        ("page_size", 48, "power of two"),
        ("max_model_len", 0, "from 1"),
        ("max_model_len", True, "whole number"),
        ("max_model_len", "32kk", "whole number"),
        ("kv_cache_memory_bytes", "4 apples", "4GiB"),
        ("kv_cache_memory_bytes", 0, "above 0"),
        ("kv_cache_memory_bytes", -5, "above 0"),
        ("gpu_memory_utilization", 0, "above 0 and at most 1"),
        ("gpu_memory_utilization", 90, "above 0 and at most 1"),
        ("gpu_memory_utilization", float("nan"), "above 0 and at most 1"),
        ("num_threads", -1, "from 0 to 1,024"),
        ("host_kv_bytes", "4 GiBs", "4GiB"),
        ("host_kv_bytes", -1, "0 or a size"),
        ("host_kv_dtype", "int4", "auto, bfloat16, int8, fp8"),
        ("kv_store", "", "not empty"),
        ("kv_store_bytes", 0, "above 0"),
        ("kv_store_sync", "never", "always, batch"),
        ("kv_store_timeout_s", 0, "from 0.001"),
        ("kv_store_timeout_s", float("nan"), "from 0.001"),
        ("kv_write_policy", "write_never", "write_through"),
        ("kv_selective_hits", 0, "from 1"),
        ("kv_background_bytes_per_s", "fast", "a size"),
        ("seed", 2**64, "whole number"),
        ("seed", 0.5, "whole number"),
        ("dtype", "int8", "auto, float32, bfloat16, float16"),
        ("quantization", "int3", "none, w8a8, w4a8, fp8"),
        ("quantization_group_size", 16, "power of two from 32 to 128"),
        ("quantization_group_size", 96, "power of two from 32 to 128"),
        ("scheduling_policy", "lifo", "fcfs, priority, deadline"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("model", "", "not empty"),
        ("model", 7, "a model"),
        ("tokenizer", "a\0b", "a folder"),
        ("speculative_config", "{", "mapping"),
        ("speculative_config", "[" * 10**5, "mapping"),
    ],
)
def test_wrong_values_name_value_and_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name} must be ")
    assert limit in message
    assert repr(value)[:150] in message
    assert len(message) < 500


def test_the_class_itself_checks_too() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineConfig(max_num_seqs=0)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("max_num_seq", "max_num_seqs"), ("max-model-len", "max_model_len"), ("Dtype", "dtype")],
)
def test_unknown_names_get_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} is not an option.*Did you mean.*{suggestion}"):
        EngineConfig.from_kwargs(**{name: 1})
    with pytest.raises(ConfigError, match=r"'xyzzy' is not an option.*docs/config.md"):
        EngineConfig.from_kwargs(xyzzy=1)


# --- YAML --------------------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "moestro.yaml"
    path.write_text(text)
    return path


def test_yaml_keys_with_dashes_or_underscores(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model: /models/x\nmax-model-len: 32k\nmax_num_seqs: 4\nenable-prefix-caching: no\n"
        "block-size: 16\nkv-cache-memory-bytes: 1.5 GB\ndtype:\n",
    )
    assert EngineConfig.from_yaml(path) == EngineConfig(
        model="/models/x",
        max_model_len=32000,
        max_num_seqs=4,
        enable_prefix_caching=False,
        page_size=16,
        kv_cache_memory_bytes=1_500_000_000,
    )


def test_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "max-num-seqs: 4\npage_size: 16\n")
    config = EngineConfig.from_yaml(path, max_num_seqs=8, block_size=None)
    assert (config.max_num_seqs, config.page_size) == (8, 16)
    assert EngineConfig.from_yaml(path, block_size=32).page_size == 32


def test_options_of_the_server_are_left_to_it(tmp_path: Path) -> None:
    path = write(tmp_path, "host: 0.0.0.0\nport: 80\nserved-model-name: [a, b]\nseed: 3\n")
    assert EngineConfig.from_yaml(path) == EngineConfig(seed=3)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert EngineConfig.from_yaml(write(tmp_path, "# nothing\n")) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 4\n", "'max_num_seq' is not an option in .*max_num_seqs"),
        ("- a\n- b\n", "must be a mapping"),
        ("just text\n", "must be a mapping"),
        ("seed: 1\nseed: 2\n", "given twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "given twice"),
        ("a: [1\n", "not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
        ("a: *nowhere\n", "not valid YAML"),
        ("seed: ten\n", "seed must be"),
        ("1: 2\n", "'1' is not an option"),
        ("? [a]\n: 1\n", "not valid YAML|is not an option"),
        ("trust-remote-code: true\n", "no equivalent"),
        ("tensor_parallel_size: 2\n", "not available in this version"),
        ("\t\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_yaml(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        EngineConfig.from_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="Can't read"):
        EngineConfig.from_yaml(tmp_path)
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    with pytest.raises(ConfigError, match="not UTF-8"):
        EngineConfig.from_yaml(path)


def test_configuration_and_planning_import_without_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "import moestro.config, moestro.config.docs, moestro.envs, moestro.log\n"
        "import moestro.core.model_config, moestro.core.generation_config\n"
        "import moestro.core.hardware, moestro.core.plan\n"
        "import moestro.planner.placement, moestro.planner.report\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
