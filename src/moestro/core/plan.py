"""Plan: the decisions, once. Made by planner/placement, obeyed by everything below it."""

from dataclasses import asdict, dataclass
from typing import Any

from moestro.core.speculative_config import SpeculativeConfig
from moestro.core.weight_format import WeightFormats

LOGITS_BLOCK_BYTES = 128 << 20
"""fp32 logits are computed for this many bytes of rows at a time (at least one row)."""
_FP32_BYTES = 4
ROTARY_BLOCK_POSITIONS = 4096
"""The table of rotary embeddings grows by this many positions at a time."""


def logits_rows(vocab_size: int, block_bytes: int = LOGITS_BLOCK_BYTES) -> int:
    """Most rows of fp32 logits at a time."""
    return max(1, block_bytes // (_FP32_BYTES * vocab_size))


def page_table_width(max_model_len: int, page_size: int) -> int:
    """Most pages of a sequence: for max_model_len tokens, and the page of one token more."""
    return max_model_len // page_size + 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What runs and what it costs on one rank. All sizes in bytes, lengths in tokens."""

    model: str
    device: str
    dtype: str
    kv_cache_dtype: str
    weight_formats: WeightFormats
    weight_bytes: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    buffer_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_context_tokens: int
    """Longest sequence the KV memory holds, whatever max_model_len says."""
    max_full_sequences: int
    """How many sequences of max_model_len fit at once."""
    num_threads: int
    num_mtp_layers: int = 0
    """MTP layers whose weights are held; each has KV in every page."""
    speculation: SpeculativeConfig | None = None
    """How tokens are drafted; None where they are not."""
    kv_hadamard: bool = False
    host_kv_dtype: str = ""
    """Of pages below the device; kv_cache_dtype unless lossy."""
    host_kv_bytes: int = 0
    """Of num_host_slots pages; with keeps_host False they only pass to and from kv_store."""
    num_host_slots: int = 0
    keeps_host: bool = True
    kv_store: str = "none"
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.buffer_bytes + self.host_kv_bytes

    @property
    def host_is_lossy(self) -> bool:
        """Whether a page comes back from the host tier with other bytes than it left with."""
        return self.host_kv_dtype not in ("", self.kv_cache_dtype)

    def to_dict(self) -> dict[str, Any]:
        """Every field, and total_bytes; what --json prints."""
        return asdict(self) | {"total_bytes": self.total_bytes}
