"""Plan: the decisions, once. Made by planner/placement, obeyed by everything below it."""

from dataclasses import asdict, dataclass
from typing import Any

from moestro.core.weight_format import WeightFormats

LOGITS_BLOCK_BYTES = 128 << 20
"""fp32 logits are computed for this many bytes of rows at a time (at least one row)."""
ROTARY_BLOCK_POSITIONS = 4096
"""The table of rotary embeddings grows by this many positions at a time."""


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
    """MTP layers whose weights are held."""
    kv_hadamard: bool = False
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_cache_bytes + self.buffer_bytes

    def to_dict(self) -> dict[str, Any]:
        """Every field, and total_bytes; what --json prints."""
        return asdict(self) | {"total_bytes": self.total_bytes}
