"""EngineConfig: every option of the engine, defined once.

A field is at the same time a keyword of LLM(...), a key of the YAML file and, with dashes, a flag.
Names are vLLM's wherever vLLM has the option.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moestro.config.kinds import Choice, Integer, Object, Seconds, Share, Size, Switch, Text
from moestro.config.knob import check_fields, knob, knobs_of
from moestro.config.kv_events import KVEventsConfig
from moestro.config.server import ServerConfig
from moestro.config.sources import own_options, read_yaml
from moestro.errors import ConfigError

_PARALLEL = "parallelism over several ranks"

_model = partial(knob, group="Model")
_limits = partial(knob, group="Limits and memory")
_run = partial(knob, group="Execution")
_tiers = partial(knob, group="KV tiers")
_parallel = partial(knob, group="Parallelism", waits_for=_PARALLEL)

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user wants of the engine; the Plan says what is done.

    Values are checked and normalised when made ("32k" becomes 32000, "4GiB" 4294967296). Raises
    ConfigError for a wrong value and for one whose feature this version lacks.
    """

    model: str = _model(
        "tiny-hy3",
        Text("a model"),
        "A bundled name, a folder, or a Hub id (the latter needs the extra `hub`).",
    )
    tokenizer: str | None = _model(
        None, Text("a folder"), "Folder or Hub id of the tokenizer. Default: the model's."
    )
    skip_tokenizer_init: bool = _model(
        False, Switch(), "Load no tokenizer: prompts and outputs are token ids only."
    )
    chat_template: str | None = _model(
        None,
        Text("a file or a template"),
        "File with a Jinja chat template, or the template itself. Default: the checkpoint's.",
    )
    generation_config: str = _model(
        "auto",
        Choice(("auto", "none"), {"vllm": "none"}),
        "auto takes default sampling values and stop ids from generation_config.json; none "
        "ignores that file.",
    )
    dtype: str = _model(
        "auto",
        Choice(_DTYPES, {"half": "float16", "float": "float32"}),
        "Compute type of weights and activations. auto is bfloat16 on CPU.",
    )
    quantization: str = _model(
        "none",
        Choice(("none", "w8a8", "w4a8", "fp8")),
        "Quantise a float checkpoint's weights at load: int8 with one scale a row (w8a8), 4 bits "
        "with one scale a group (w4a8), both on int8 activations; E4M3 (fp8). none takes them as "
        "the checkpoint has them, quantised or not.",
        flags=("-q",),
    )
    quantization_group_size: int = _model(
        32,
        Integer(32, 128, power_of_two=True),
        "Weights that share one scale in w4a8: 32, 64 or 128.",
    )
    max_model_len: int | None = _limits(
        None,
        Integer(1, 2**31 - 1, auto=True),
        "Longest sequence, prompt and output together, in tokens. Default: what the checkpoint "
        "allows, or what the KV memory holds if that is less.",
    )
    max_num_seqs: int = _limits(
        128, Integer(1, 2**16), "Most sequences that run at once; more wait their turn."
    )
    max_num_batched_tokens: int = _limits(
        2048,
        Integer(1, 2**20),
        "Most tokens computed in one step; longer prompts are computed in chunks. May be "
        "smaller than max_num_seqs.",
    )
    page_size: int = _limits(
        64,
        Integer(1, 2**12, power_of_two=True),
        "Tokens in one page of KV memory, the unit of allocation and of prefix reuse.",
        also=("block_size",),
    )
    kv_cache_dtype: str = _limits(
        "auto",
        Choice(("auto", "bfloat16", "int8", "fp8"), {"fp8_e4m3": "fp8"}),
        "Type of cached keys and values. auto is the compute type; int8 and fp8 keep a scale a "
        "token and head.",
    )
    kv_hadamard: bool = _limits(
        False,
        Switch(),
        "Rotate queries and keys before keys are quantised, which spreads outliers. Needs int8 or "
        "fp8 and a head dimension that is a power of two.",
    )
    kv_cache_memory_bytes: int | None = _limits(
        None,
        Size(1),
        "KV memory. Default on CPU: the smaller of 4 GiB and a quarter of what is left after the "
        "weights.",
    )
    gpu_memory_utilization: float | None = _limits(
        None,
        Share(),
        "Share of the device's memory that weights, buffers and KV may take together; the KV "
        "cache gets the rest of it. kv_cache_memory_bytes wins over it.",
        also=("device_memory_utilization",),
    )
    enable_prefix_caching: bool = _limits(
        True, Switch(), "Reuse the KV of prompts that begin alike."
    )
    num_threads: int = _run(
        0, Integer(0, 1024), "Compute threads. 0: as many as affinity and cgroup allow."
    )
    enforce_eager: bool = _run(
        False,
        Switch(),
        "Never capture decode steps as graphs: every step goes through Python. The same tokens, "
        "slower; for looking into a step.",
    )
    seed: int = _run(
        0, Integer(-(2**63), 2**64 - 1), "Seed from which unseeded requests derive theirs."
    )
    scheduling_policy: str = _run(
        "fcfs",
        Choice(("fcfs", "priority", "deadline")),
        "Order of waiting requests: first come first served, or by priority (low first).",
        waits_for="deadline scheduling",
        ready=("fcfs", "priority"),
    )
    async_scheduling: bool = _run(
        False,
        Switch(),
        "Plan a step while the one before it runs, so that the device never waits for it. The same "
        "tokens.",
    )
    speculative_config: Mapping[str, Any] | None = _run(
        None,
        Object(),
        "Draft tokens and verify several at once; what is said stays the same: "
        '{"method": "mtp"|"ngram"|"hybrid", "num_speculative_tokens": 1 to 32} and optionally '
        "prompt_lookup_min, prompt_lookup_max. mtp and hybrid need a checkpoint with "
        "MTP layers.",
    )
    cache_dir: str | None = _run(
        None,
        Text("a folder"),
        "Root of what is cached on disk. Default: MOESTRO_CACHE_DIR.",
    )
    weight_cache: str = _run(
        "auto",
        Text("off, auto or a folder"),
        "Packed weights kept on disk and mapped at the next start. auto: under cache_dir, when "
        "packing took over 2 seconds; a folder: there, always.",
    )
    weight_cache_bytes: int = _run(
        64 * 2**30,
        Size(1),
        "Byte budget of the packed weights; those used longest ago are deleted first.",
    )
    host_kv_bytes: int = _tiers(
        0,
        Size(),
        "Host memory for KV pages that the device no longer holds; 0 is no host tier. On CPU it is "
        "a second place in the same memory: of use to keep tenants or tests apart, no more.",
    )
    host_kv_dtype: str = _tiers(
        "auto",
        Choice(("auto", "bfloat16", "int8", "fp8"), {"fp8_e4m3": "fp8"}),
        "Type of KV in the host tier. auto is the device's. A narrower one is lossy: a hit then "
        "gives other tokens than a miss, and no page goes on to a store.",
    )
    kv_store: str = _tiers(
        "none",
        Text("a store"),
        "Where KV pages outlive the process: none, lmdb://PATH, redis://HOST:PORT/DB or "
        "mooncake://MASTER:PORT. Several engines may share one.",
        secret=True,
    )
    kv_store_bytes: int = _tiers(
        16 * 2**30, Size(1), "Byte budget of an LMDB store; servers have their own."
    )
    kv_store_sync: str = _tiers(
        "batch",
        Choice(("always", "batch")),
        "When an LMDB store's writes reach the disk: always, with each, or batch, every few "
        "seconds. After a power loss older pages may come back, never torn ones.",
    )
    kv_store_timeout_s: float = _tiers(
        2.0,
        Seconds(0.001),
        "What a call of the store may take; after that its pages are computed instead.",
    )
    kv_write_policy: str = _tiers(
        "write_through",
        Choice(("write_through", "write_through_selective", "write_back")),
        "When full pages sink to lower tiers: as soon as they are computed, once they have been "
        "hit kv_selective_hits times, or when the device evicts them.",
    )
    kv_selective_hits: int = _tiers(
        2, Integer(1, 2**20), "Hits of a page before write_through_selective lets it sink."
    )
    kv_background_bytes_per_s: int = _tiers(
        256 * 2**20,
        Size(),
        "What KV pages that nobody waits for may move a second, beside the model's own work; 0 is "
        "no limit.",
    )
    kv_pin_share: float = _tiers(
        0.5,
        Share(may_be_zero=True),
        "Share of each tier that pinned pages of all sessions may take; 0 refuses every pin.",
    )
    kv_session_pin_share: float = _tiers(
        0.5, Share(), "Share of those pages that the pins of one session may take."
    )
    kv_events_config: Mapping[str, Any] | None = knob(
        None,
        Object(),
        'Publish which KV pages come and go, in vLLM\'s format: {"enable_kv_cache_events": true, '
        '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "topic": ...} (needs the '
        "extra `events`; the events hold the token ids of prompts).",
        group="KV tiers",
    )
    tensor_parallel_size: int = _parallel(
        1, Integer(1, 2**16), "Ranks that share each layer's tensors.", flags=("-tp",)
    )
    data_parallel_size: int = _parallel(
        1, Integer(1, 2**16), "Groups of ranks with sequences of their own.", flags=("-dp",)
    )
    enable_expert_parallel: bool = _parallel(
        False, Switch(), "Spread whole experts over ranks.", flags=("-ep",)
    )
    enable_eplb: bool = _parallel(False, Switch(), "Rebalance experts while serving.")
    prefill_parallel_config: Mapping[str, Any] | None = _parallel(
        None, Object(), "Layout of ranks during prefill."
    )
    decode_parallel_config: Mapping[str, Any] | None = _parallel(
        None, Object(), "Layout of ranks during decode."
    )
    fast_collectives: bool = _parallel(
        False, Switch(), "Allow collectives whose result depends on the layout."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kv_events.publishes and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config has nothing to tell with enable_prefix_caching false: leave one "
                "of them out."
            )

    @property
    def kv_events(self) -> KVEventsConfig:
        """kv_events_config, checked."""
        return KVEventsConfig.from_mapping(self.kv_events_config)

    @classmethod
    def from_kwargs(cls, **options: Any) -> "EngineConfig":
        """From Python keywords, vLLM's among them; None means the default. Raises ConfigError."""
        return cls(**own_options(cls, options))

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> "EngineConfig":
        """From a YAML mapping; `overrides` win. One file may serve every command, so options of
        the server are left to it. Raises ConfigError.
        """
        written = own_options(cls, read_yaml(path), where=f" in {path}", ignore=SERVER_OPTIONS)
        return cls(**written | own_options(cls, overrides))


SERVER_OPTIONS = frozenset(
    name for own, (_, option) in knobs_of(ServerConfig).items() for name in (own, *option.also)
)
