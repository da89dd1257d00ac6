"""vLLM's keywords that are no option here: which values are harmless, and why others have no place.

A keyword with the value that asks for what happens anyway is accepted and dropped, so that a
script written for vLLM starts; any other value is refused with the reason.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignName:
    """Values that change nothing here, and the reason why the others can't be had."""

    harmless: tuple[object, ...]
    reason: str


_ANY_SWITCH = (True, False)
_TEXT_ONLY = "Hy3 and Qwen3-MoE are text models"
_ONE_STAGE = "layers are not split over ranks; use tensor, data or expert parallelism"
_STRICT = "config.json is read as it is; correct the file or use a copy of it"
_NO_REVISION = "the default revision is used; pass a folder that holds the revision you want"
_BUILT_IN = "there is one implementation for each device, chosen by its kernels"

FOREIGN_NAMES: dict[str, ForeignName] = {
    "trust_remote_code": ForeignName((False,), "code from a checkpoint is never run"),
    "allowed_local_media_path": ForeignName(("",), _TEXT_ONLY),
    "limit_mm_per_prompt": ForeignName(({},), _TEXT_ONLY),
    "mm_processor_kwargs": ForeignName(({},), _TEXT_ONLY),
    "language_model_only": ForeignName(_ANY_SWITCH, _TEXT_ONLY),
    "runner": ForeignName(("auto", "generate"), "models only generate here"),
    "task": ForeignName(("auto", "generate"), "models only generate here"),
    "convert": ForeignName(("auto", "none"), "models only generate here"),
    "tokenizer_mode": ForeignName(("auto", "hf"), "tokenizer.json is the only form read"),
    "revision": ForeignName(("main",), _NO_REVISION),
    "code_revision": ForeignName(("main",), "code from a checkpoint is never run"),
    "tokenizer_revision": ForeignName(("main",), _NO_REVISION),
    "hf_token": ForeignName((False,), "log in with the Hub's own client"),
    "hf_overrides": ForeignName(({},), _STRICT),
    "hf_config_path": ForeignName((), _STRICT),
    "config_format": ForeignName(("auto", "hf"), "config.json is the only form read"),
    "load_format": ForeignName(("auto", "safetensors"), "weights are read from safetensors only"),
    "download_dir": ForeignName((), "the Hub's client keeps its own cache; set HF_HOME"),
    "ignore_patterns": ForeignName(("original/**/*",), "only the files needed are fetched"),
    "override_generation_config": ForeignName(
        ({},), "give explicit sampling values, or generation_config=none"
    ),
    "enable_chunked_prefill": ForeignName(
        (True,), "prefill is always chunked under max_num_batched_tokens"
    ),
    "max_num_partial_prefills": ForeignName((1,), "max_num_batched_tokens alone bounds a step"),
    "prefix_caching_hash_algo": ForeignName(
        ("sha256", "sha256_cbor", "builtin", "xxhash", "xxhash_cbor"),
        "page hashes are chained content hashes of one kind",
    ),
    "swap_space": ForeignName(
        (0, 4), "preempted sequences are recomputed; host_kv_bytes will name a host tier"
    ),
    "cpu_offload_gb": ForeignName((0,), "weights stay on one device"),
    "kv_offloading_size": ForeignName((0,), "name the size of the host tier with host_kv_bytes"),
    "num_gpu_blocks_override": ForeignName((), "set kv_cache_memory_bytes"),
    "sliding_window": ForeignName((), "Hy3 and Qwen3-MoE attend to the whole context"),
    "disable_sliding_window": ForeignName(_ANY_SWITCH, "attention is always full"),
    "pipeline_parallel_size": ForeignName((1,), _ONE_STAGE),
    "distributed_executor_backend": ForeignName(("mp", "uni"), "ranks are started by one launcher"),
    "disable_custom_all_reduce": ForeignName(_ANY_SWITCH, _BUILT_IN),
    "attention_backend": ForeignName(("auto",), _BUILT_IN),
    "compilation_config": ForeignName((0, {}), "models run without a graph compiler"),
    "max_seq_len_to_capture": ForeignName((8192,), "prefill is never captured"),
    "device": ForeignName(("auto", "cpu"), "the device is the machine's; only CPU so far"),
    "enable_lora": ForeignName((False,), "adapters are not supported; merge them first"),
    "quantization_param_path": ForeignName((), "scales are read from the checkpoint"),
    "disable_log_stats": ForeignName(_ANY_SWITCH, "metrics cost nothing unless they are read"),
    "max_logprobs": ForeignName((20,), "at most 20 log probabilities a token are returned"),
    "logprobs_mode": ForeignName(
        ("raw_logprobs",), "log probabilities are those before temperature and penalties"
    ),
    "disable_cascade_attn": ForeignName(_ANY_SWITCH, _BUILT_IN),
    "stream_interval": ForeignName((1,), "every step's tokens are streamed"),
    "worker_cls": ForeignName(("auto",), "the engine's classes are fixed"),
    "scheduler_cls": ForeignName((), "the engine's classes are fixed"),
    "kv_transfer_config": ForeignName((), "KV leaves the device through kv_store"),
    "use_tqdm_on_load": ForeignName(_ANY_SWITCH, "progress is shown on a terminal only"),
    "enable_sleep_mode": ForeignName((False,), "close the engine to give its memory back"),
}
