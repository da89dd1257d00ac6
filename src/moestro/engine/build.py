"""The one place where an engine is wired together: configuration in, BuiltEngine out."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moestro.backends import load_backend
from moestro.backends.base import Device
from moestro.chat.templates import ChatTemplate
from moestro.config import EngineConfig
from moestro.core.generation_config import GenerationDefaults, load_generation_defaults
from moestro.core.grammar import GrammarCompiler
from moestro.core.model_config import load_model_spec
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.core.sampling_params import SamplingParams
from moestro.engine.built_engine import BuiltEngine
from moestro.engine.drafters import make_draft_policy, make_drafter
from moestro.engine.engine import Engine
from moestro.engine.input_processor import InputLimits, InputProcessor
from moestro.engine.kv_event_publisher import KVEventPublisher
from moestro.engine.kv_tiers import make_tiers, tier_config, weights_digest
from moestro.engine.planned_model import planned_model
from moestro.engine.tokenizer import Tokenizer
from moestro.errors import CapacityError
from moestro.kvcache.manager import KVCacheManager
from moestro.models.causal_lm import CausalLM
from moestro.planner.placement import make_plan
from moestro.planner.report import plan_lines
from moestro.planner.speculation import plan_speculation
from moestro.planner.units import gigabytes
from moestro.planner.weight_formats import Stored
from moestro.quant.kv import KV_DTYPES
from moestro.runner.kv_pool import KVPool
from moestro.runner.kv_tiers import KVTiers
from moestro.runner.model_runner import ModelRunner
from moestro.scheduler import Scheduler, SchedulerLimits
from moestro.weights.checkpoint import Checkpoint
from moestro.weights.loader import stored_formats
from moestro.weights.source import resolve_model, user_path

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


def build_engine(
    config: EngineConfig,
    progress: Progress | None = None,
    graph_progress: Progress | None = None,
    *,
    grammar: GrammarCompiler | None = None,
) -> BuiltEngine:
    """Find, plan, load, wire and warm up. progress: (bytes read, bytes in all) while weights load;
    graph_progress: (batch sizes captured, in all) while decode steps are captured.

    What is cheap is checked first, so that a wrong option fails before gigabytes are read. Sets
    the process's compute threads. Raises ConfigError, CheckpointError, UnsupportedError or
    CapacityError.
    """
    model_dir, spec, device, plan = _plan(config)
    tokenizer_dir = _tokenizer_dir(config, model_dir)
    chat_template = ChatTemplate.load(tokenizer_dir, config.chat_template)
    tokenizer = None
    if not config.skip_tokenizer_init:
        tokenizer = Tokenizer.load(tokenizer_dir, chat_template)
    processor = _make_processor(config, model_dir, spec, plan, tokenizer)
    event_sink = KVEventPublisher(config.kv_events) if config.kv_events.publishes else None
    device.set_num_threads(plan.num_threads)
    _set_torch_threads(plan.num_threads)
    began_s = time.monotonic()
    runner, tiers = _load_runner(device, plan, spec, model_dir, config, progress)
    loaded_s = time.monotonic()
    num_drafts = 0 if plan.speculation is None else plan.speculation.num_speculative_tokens
    runner.warm_up(graph_progress, num_drafts)
    logger.info(
        "weights loaded in %.2f s, decode steps captured in %.2f s: %s",
        loaded_s - began_s,
        time.monotonic() - loaded_s,
        runner.graph_summary,
    )
    cache = KVCacheManager(
        plan.num_pages,
        plan.page_size,
        config.enable_prefix_caching,
        mover=None if tiers is None else tiers.transfer,
        tiers=tier_config(config, plan),
    )
    scheduler = _make_scheduler(config, plan, cache, grammar, spec.vocab_size)
    return BuiltEngine(
        config=config,
        spec=spec,
        plan=plan,
        engine=Engine(scheduler, runner, tokenizer, cache=cache, event_sink=event_sink),
        processor=processor,
        chat_template=chat_template,
        event_sink=event_sink,
    )


def _make_scheduler(
    config: EngineConfig,
    plan: Plan,
    cache: KVCacheManager,
    grammar: GrammarCompiler | None,
    vocab_size: int,
) -> Scheduler:
    limits = SchedulerLimits(
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        plan.max_model_len,
        max_steps_ahead=int(config.async_scheduling),
    )
    policy, drafts = config.scheduling_policy, make_draft_policy(plan)
    return Scheduler(limits, cache, policy, grammar, vocab_size, drafts)


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _set_torch_threads(count: int) -> None:
    """Threads of what torch computes while loading: one in a forked child.

    A child has none of the threads of torch's OpenMP, and waits for them forever. The kernels'
    own pool is made anew after fork.
    """
    torch.set_num_threads(1 if _forked else count)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model without an engine around it, for measuring what is inside."""

    model: CausalLM
    spec: ModelSpec
    plan: Plan
    tokenizer: Tokenizer


def load_model(config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Find, plan and load, as build_engine does."""
    model_dir, spec, device, plan = _plan(config)
    tokenizer_dir = _tokenizer_dir(config, model_dir)
    template = ChatTemplate.load(tokenizer_dir, config.chat_template)
    tokenizer = Tokenizer.load(tokenizer_dir, template)
    device.set_num_threads(plan.num_threads)
    _set_torch_threads(plan.num_threads)
    with _refused_memory(plan):
        model = planned_model(device, plan, spec, model_dir, config, progress)
    return LoadedModel(model, spec, plan, tokenizer)


def _plan(config: EngineConfig) -> tuple[Path, ModelSpec, Device, Plan]:
    model_dir = resolve_model(config.model)
    spec = load_model_spec(model_dir)
    speculation = plan_speculation(config)
    uses_mtp = speculation is not None and speculation.method.uses_mtp
    num_mtp_layers, stored = _inspect(model_dir, spec, uses_mtp)
    device = load_backend("cpu")
    plan = make_plan(
        config.model,
        spec,
        device.hardware(),
        config,
        num_mtp_layers=num_mtp_layers,
        stored_formats=stored,
    )
    for line in plan_lines(plan):
        logger.info("%s", line)
    return model_dir, spec, device, plan


def _inspect(model_dir: Path, spec: ModelSpec, uses_mtp: bool) -> tuple[int, Stored | None]:
    """MTP layers that are there and of use (none where the checkpoint lacks what its config
    promises), and the formats that a quantised checkpoint's headers show."""
    if not (uses_mtp and spec.num_mtp_layers) and spec.quantization is None:
        return 0, None
    with Checkpoint.open(model_dir) as checkpoint:
        num_mtp_layers = spec.num_mtp_layers if uses_mtp and checkpoint.has_mtp(spec) else 0
        return num_mtp_layers, stored_formats(checkpoint, spec, num_mtp_layers) or None


def _tokenizer_dir(config: EngineConfig, model_dir: Path) -> Path:
    if config.tokenizer is None:
        return model_dir
    path = user_path(config.tokenizer)
    return path if path.is_dir() else resolve_model(config.tokenizer, with_weights=False)


def _make_processor(
    config: EngineConfig,
    model_dir: Path,
    spec: ModelSpec,
    plan: Plan,
    tokenizer: Tokenizer | None,
) -> InputProcessor:
    defaults = GenerationDefaults()
    if config.generation_config != "none":
        defaults = load_generation_defaults(model_dir, spec.vocab_size)
    eos = {*spec.eos_token_ids, *defaults.eos_token_ids}
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = {tokenizer.eos_token_id}
    return InputProcessor(
        InputLimits(spec.vocab_size, plan.max_model_len, plan.max_context_tokens),
        tokenizer,
        eos_token_ids=eos,
        engine_seed=config.seed,
        default_params=SamplingParams(**defaults.sampling),
        default_max_tokens=defaults.sampling.get("max_tokens"),
        scheduling_policy=config.scheduling_policy,
    )


def _load_runner(
    device: Device,
    plan: Plan,
    spec: ModelSpec,
    model_dir: Path,
    config: EngineConfig,
    progress: Progress | None,
) -> tuple[ModelRunner, KVTiers | None]:
    weights = weights_digest(config, plan, model_dir)
    with _refused_memory(plan):
        model = planned_model(device, plan, spec, model_dir, config, progress)
        kv_pool = KVPool(
            spec,
            plan.num_pages,
            plan.page_size,
            KV_DTYPES[plan.kv_cache_dtype],
            spec.num_hidden_layers + plan.num_mtp_layers,
            hadamard=plan.kv_hadamard,
        )
        tiers = make_tiers(config, plan, spec, device, kv_pool, weights)
        runner = ModelRunner(
            model,
            kv_pool,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            graph_pool=None if config.enforce_eager else device.graph_pool(),
            tiers=tiers,
            drafter=make_drafter(plan, device, model, kv_pool, captures=not config.enforce_eager),
        )
        return runner, tiers


@contextmanager
def _refused_memory(plan: Plan) -> Iterator[None]:
    """Says what was asked for where the system refuses memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch raises a RuntimeError of its own for a refused allocation
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise CapacityError(
            f"The system refused memory for {plan.model} (weights {gigabytes(plan.weight_bytes)}, "
            f"KV {gigabytes(plan.kv_cache_bytes + plan.host_kv_bytes)}): {error}. Is there a limit "
            "(ulimit -v)? Set kv_cache_memory_bytes, max_num_seqs or max_model_len lower."
        ) from error
