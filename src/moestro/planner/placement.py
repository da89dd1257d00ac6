"""ModelSpec + HardwareSpec + EngineConfig -> Plan: what is done, and whether it fits.

Pure arithmetic, so that `moestro plan` answers in milliseconds from a config.json.
"""

from dataclasses import dataclass, fields

from moestro.config import EngineConfig
from moestro.core.hardware import HardwareSpec
from moestro.core.model_spec import ModelSpec
from moestro.core.plan import Plan
from moestro.errors import CapacityError, ConfigError, UnsupportedError, without_password
from moestro.planner.host_tier import plan_host_tier
from moestro.planner.sizes import (
    KV_CODE_BYTES,
    DraftSizes,
    buffer_bytes,
    draft_bytes,
    graph_bytes,
    kv_token_bytes,
    weight_bytes,
)
from moestro.planner.speculation import held_mtp_layers, plan_speculation
from moestro.planner.units import gigabytes
from moestro.planner.weight_formats import Stored, choose_weight_formats

DEFAULT_KV_BYTES = 4 * 2**30
"""CPU default of the KV memory, unless a quarter of what is left after the weights is less."""


@dataclass(frozen=True, slots=True)
class FitReport:
    """A Plan, and what keeps it from running.

    shortage: None when it fits, else a sentence that says what is missing and what would fit.
    missing_bytes: how much more memory it needs. largest_context_tokens: longest sequence, within
    the checkpoint's positions, if everything left beside weights and buffers were KV memory.
    """

    plan: Plan
    shortage: str | None
    missing_bytes: int
    available_bytes: int
    largest_context_tokens: int

    @property
    def fits(self) -> bool:
        return self.shortage is None

    def to_dict(self) -> dict[str, object]:
        """For --json: the report's fields and the Plan's, flat."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "plan"}
        return {"fits": self.fits, **own, **self.plan.to_dict()}


def make_plan(
    model: str,
    spec: ModelSpec,
    hardware: HardwareSpec,
    config: EngineConfig,
    *,
    num_mtp_layers: int | None = None,
    stored_formats: Stored | None = None,
) -> Plan:
    """The Plan of one rank.

    num_mtp_layers: MTP layers that the checkpoint holds; None is all that its config promises.
    They count only where they draft.
    stored_formats: what a quantised checkpoint's headers say; None is what its config says.
    Raises CapacityError (says what fits), ConfigError and UnsupportedError.
    """
    report = fit_plan(
        model,
        spec,
        hardware,
        config,
        num_mtp_layers=num_mtp_layers,
        stored_formats=stored_formats,
    )
    if report.shortage is not None:
        raise CapacityError(report.shortage)
    return report.plan


def fit_plan(
    model: str,
    spec: ModelSpec,
    hardware: HardwareSpec,
    config: EngineConfig,
    *,
    num_mtp_layers: int | None = None,
    stored_formats: Stored | None = None,
) -> FitReport:
    """As make_plan, but a lack of memory is reported, not raised."""
    return _Placement(model, spec, hardware, config, num_mtp_layers, stored_formats).report()


class _Placement:
    """One planning: decides the types, then divides the memory."""

    def __init__(
        self,
        model: str,
        spec: ModelSpec,
        hardware: HardwareSpec,
        config: EngineConfig,
        num_mtp_layers: int | None,
        stored_formats: Stored | None,
    ) -> None:
        if hardware.device != "cpu":
            raise UnsupportedError(
                f"device {hardware.device!r} comes with its backend; this version plans for cpu."
            )
        self.model, self.spec, self.hardware, self.config = model, spec, hardware, config
        stored = spec.num_mtp_layers if num_mtp_layers is None else num_mtp_layers
        self.speculation = plan_speculation(config)
        self.num_mtp_layers = held_mtp_layers(model, spec, self.speculation, stored)
        self.notes: list[str] = []
        self.dtype = self._choose_dtype()
        self.weight_formats, format_notes = choose_weight_formats(
            spec, config, self.dtype, self.num_mtp_layers, stored_formats
        )
        self.notes.extend(format_notes)
        self.kv_cache_dtype = self._choose_kv_dtype()
        self.wanted_len = self._wanted_len()
        self.token_bytes = kv_token_bytes(spec, self.kv_cache_dtype, self.num_mtp_layers)
        self.page_bytes = self.token_bytes * config.page_size
        self.weight_bytes = weight_bytes(spec, self.weight_formats, self.num_mtp_layers)
        self.buffer_bytes = self._buffer_bytes()
        self.budget = self._budget()
        self.left = self.budget - self.weight_bytes - self.buffer_bytes
        self.host, host_notes = plan_host_tier(
            spec, config, self.kv_cache_dtype, self.num_mtp_layers, self.left
        )
        self.notes.extend(host_notes)
        self.left -= self.host.num_bytes

    def report(self) -> FitReport:
        """Divide the memory and say what is missing."""
        sequence_pages = self._pages(self.wanted_len)
        num_pages = max(0, self._kv_bytes()) // self.page_bytes
        max_model_len = self.wanted_len
        shortage, missing = self._memory_shortage()
        if shortage is None and num_pages < sequence_pages:
            if self.config.max_model_len is None and num_pages > 0:
                max_model_len = num_pages * self.config.page_size
                self._note_clipped(max_model_len)
            else:
                shortage = self._kv_shortage(num_pages)
                missing = (sequence_pages - num_pages) * self.page_bytes
        plan = self._plan(num_pages, max_model_len)
        largest = self._longest(max(0, self.left) // self.page_bytes)
        return FitReport(plan, shortage, missing, self.budget, largest)

    def _plan(self, num_pages: int, max_model_len: int) -> Plan:
        config = self.config
        return Plan(
            model=self.model,
            device=self.hardware.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            weight_formats=self.weight_formats,
            weight_bytes=self.weight_bytes,
            kv_bytes_per_token=self.token_bytes,
            kv_cache_bytes=num_pages * self.page_bytes,
            buffer_bytes=self.buffer_bytes,
            page_size=config.page_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_context_tokens=num_pages * config.page_size,
            max_full_sequences=min(config.max_num_seqs, num_pages // self._pages(max_model_len)),
            num_threads=self._num_threads(),
            num_mtp_layers=self.num_mtp_layers,
            speculation=self.speculation,
            kv_hadamard=self.config.kv_hadamard,
            host_kv_dtype=self.host.dtype,
            host_kv_bytes=self.host.num_bytes,
            num_host_slots=self.host.num_slots,
            keeps_host=self.host.keeps,
            kv_store=without_password(self.config.kv_store),
            notes=tuple(self.notes),
        )

    def _choose_dtype(self) -> str:
        dtype = self.config.dtype
        if dtype == "auto":
            dtype = "bfloat16"
        if dtype != self.spec.dtype:
            self.notes.append(
                f"computes in {dtype}; the checkpoint is {self.spec.dtype} (dtype chooses)"
            )
        return dtype

    def _choose_kv_dtype(self) -> str:
        wanted = self.config.kv_cache_dtype
        chosen = self.dtype if wanted == "auto" else wanted
        if not self.config.kv_hadamard:
            return chosen
        if chosen not in KV_CODE_BYTES:
            raise ConfigError(
                f"kv_hadamard rotates keys before they are quantised, but kv_cache_dtype={wanted!r}"
                f" keeps them in {chosen}. Use kv_cache_dtype='int8' or 'fp8', or no kv_hadamard."
            )
        dim = self.spec.head_dim
        if dim & (dim - 1):
            raise UnsupportedError(
                f"kv_hadamard needs a head dimension that is a power of two; {self.model} has "
                f"{dim}. Leave kv_hadamard off."
            )
        return chosen

    def _wanted_len(self) -> int:
        limit = self.spec.max_position_embeddings
        wanted = self.config.max_model_len
        if wanted is not None and wanted > limit:
            raise ConfigError(
                f"max_model_len={wanted} is beyond the {limit} positions of the checkpoint. Use at "
                f"most {limit}, or stretch it with YaRN in config.json if the model allows."
            )
        return limit if wanted is None else wanted

    def _buffer_bytes(self) -> int:
        """What steps need beside weights and KV, those that draft among them."""
        spec, config, dtype = self.spec, self.config, self.dtype
        seqs, tokens, length = config.max_num_seqs, config.max_num_batched_tokens, self.wanted_len
        rows = seqs
        if self.speculation is not None:  # a sequence's drafts are scored beside its last token
            most = seqs * (1 + self.speculation.num_speculative_tokens)
            rows = max(rows, min(most, tokens))
        total = buffer_bytes(spec, dtype, tokens, rows, length)
        if not config.enforce_eager:
            total += graph_bytes(spec, dtype, rows, seqs, length, config.page_size)
        if self.num_mtp_layers:
            drafts = DraftSizes(
                dtype=dtype,
                num_tokens=tokens,
                num_seqs=seqs,
                length=length,
                page_size=config.page_size,
                num_mtp_layers=self.num_mtp_layers,
            )
            total += draft_bytes(spec, drafts)
        return total

    def _budget(self) -> int:
        """Bytes that weights, buffers and KV may take together."""
        available = self.hardware.available_bytes
        share = self.config.gpu_memory_utilization
        if share is None:
            return available
        allowed = int(self.hardware.memory_bytes * share)
        if allowed > available:
            self.notes.append(
                f"gpu_memory_utilization={share:g} is {gigabytes(allowed)}, but only "
                f"{gigabytes(available)} are free"
            )
        return min(available, allowed)

    def _kv_bytes(self) -> int:
        """KV memory by option, share or default; never more than is left."""
        config = self.config
        if config.kv_cache_memory_bytes is not None:
            return min(self.left, config.kv_cache_memory_bytes)
        if config.gpu_memory_utilization is not None:
            return self.left
        usual = min(DEFAULT_KV_BYTES, (self.budget - self.weight_bytes) // 4)
        if config.max_model_len is None:
            return min(self.left, usual)
        # a length that was asked for is given more than the default when it needs it
        return min(self.left, max(usual, self._pages(self.wanted_len) * self.page_bytes))

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _longest(self, num_pages: int) -> int:
        """Tokens of the longest sequence that fits into pages and the checkpoint's positions."""
        return min(num_pages * self.config.page_size, self.spec.max_position_embeddings)

    def _num_threads(self) -> int:
        return self.config.num_threads or self.hardware.num_threads

    def _note_clipped(self, max_model_len: int) -> None:
        needed = self._pages(self.wanted_len) * self.page_bytes
        self.notes.append(
            f"max_model_len is {max_model_len}, what the KV memory holds; the checkpoint's "
            f"{self.wanted_len} need kv_cache_memory_bytes of {needed} ({gigabytes(needed)})"
        )

    def _memory_shortage(self) -> tuple[str | None, int]:
        """Weights, buffers or an explicit KV size beyond the budget."""
        least = self.config.kv_cache_memory_bytes or self.page_bytes
        missing = least - self.left
        if missing <= 0:
            return None, 0
        needs = (
            f"weights {gigabytes(self.weight_bytes)} ({self.weight_formats.linear}) + buffers "
            f"{gigabytes(self.buffer_bytes)} + KV memory {gigabytes(least)}"
        )
        if self.host.num_slots:
            needs += f" + host tier {gigabytes(self.host.num_bytes)} (host_kv_bytes)"
        text = (
            f"{self.model} does not fit: {needs} need {gigabytes(missing)} more than the "
            f"{gigabytes(self.budget)} that may be used."
        )
        if self.left >= self.page_bytes:
            return f"{text} {self._what_fits(self.left // self.page_bytes)}", missing
        smaller = "a smaller model, a machine with more memory"
        if self.host.num_bytes > missing:
            most = self.host.num_bytes - missing
            smaller = f"host_kv_bytes of at most {most} ({gigabytes(most)})"
        elif self.buffer_bytes > missing:
            smaller = "a smaller max_num_batched_tokens or max_num_seqs"
        return f"{text} No KV memory is left: it takes {smaller}.", missing

    def _kv_shortage(self, num_pages: int) -> str:
        needed = self._pages(self.wanted_len) * self.page_bytes
        have = num_pages * self.page_bytes
        return (
            f"{self.model} does not fit: a sequence of max_model_len={self.wanted_len} tokens "
            f"needs {gigabytes(needed)} of KV memory, and there are {gigabytes(have)}. "
            f"{self._what_fits(max(num_pages, self.left // self.page_bytes))}"
        )

    def _what_fits(self, num_pages: int) -> str:
        """What all the memory that is left would hold."""
        longest = self._longest(num_pages)
        usual = min(longest, self.wanted_len)
        sequences = min(self.config.max_num_seqs, num_pages // self._pages(usual))
        return (
            f"What fits: kv_cache_memory_bytes up to {num_pages * self.page_bytes} "
            f"({gigabytes(num_pages * self.page_bytes)}), that holds max_model_len up to "
            f"{longest}, or {sequences} sequences of {usual} tokens at once."
        )
