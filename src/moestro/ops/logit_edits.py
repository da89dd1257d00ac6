"""Edits of logits before a draw: token bias, grammar mask, penalties. Part of ops.sample's spec.

All are per row: what row r has lies in a segment of its own, [starts[r], starts[r] + sizes[r]), so
that a segment may grow in place; entries outside of all segments are of no meaning.
"""

from dataclasses import dataclass

import torch

_NEVER = float("-inf")


def check_vectors(size: int, dtype: torch.dtype, **vectors: torch.Tensor) -> None:
    """Raise ValueError unless each is [size] of the dtype, one element after another in memory.

    Kernels read these by address: another type or stride would be other numbers.
    """
    for name, vector in vectors.items():
        if vector.dtype != dtype or vector.shape != (size,) or not vector.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous {dtype} tensor [{size}], got {vector.dtype} "
                f"{list(vector.shape)} with strides {list(vector.stride())}."
            )


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Numbers added to single logits, -inf to forbid a token.

    starts, sizes: [S] int64; token_ids: [N] int64, distinct in a row; values: [N] fp32.
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        check_vectors(len(self.starts), torch.int64, starts=self.starts, sizes=self.sizes)
        check_vectors(len(self.token_ids), torch.int64, token_ids=self.token_ids)
        check_vectors(len(self.token_ids), torch.float32, values=self.values)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Grammar masks.

    rows: [S] int64, the row of bits, or -1 for none; bits: [R, ceil(V / 8)] uint8, as core.grammar
    lays them.
    """

    rows: torch.Tensor
    bits: torch.Tensor

    def __post_init__(self) -> None:
        check_vectors(len(self.rows), torch.int64, rows=self.rows)
        if self.bits.dtype != torch.uint8 or not self.bits.is_contiguous():
            raise ValueError(
                f"bits must be a contiguous torch.uint8 tensor, got {self.bits.dtype}."
            )


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The earlier tokens that penalties act on, one entry a distinct token of a row.

    starts, sizes: [S] int64; token_ids: [N] int64, distinct in a row; output_counts: [N] int64,
    occurrences in the output (0: in the prompt only). repetition, frequency, presence: [S]
    float64, the row's penalties.
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    token_ids: torch.Tensor
    output_counts: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def __post_init__(self) -> None:
        rows, entries = len(self.starts), len(self.token_ids)
        check_vectors(rows, torch.int64, starts=self.starts, sizes=self.sizes)
        check_vectors(
            entries, torch.int64, token_ids=self.token_ids, output_counts=self.output_counts
        )
        check_vectors(
            rows,
            torch.float64,
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
        )


def apply_token_bias(logits: torch.Tensor, bias: TokenBias) -> None:
    """Add bias.values to single logits. logits: [S, V] fp32, finite or -inf; mutated.

    -inf forbids a token whatever else is added to it.
    """
    rows, entries = _entries(bias.starts, bias.sizes)
    at = (rows, bias.token_ids[entries])
    logits[at] = logits[at] + bias.values[entries]


def apply_token_mask(logits: torch.Tensor, mask: TokenMask) -> None:
    """Forbid (-inf) every token whose bit is 0. logits: [S, V] fp32; mutated."""
    masked = (mask.rows >= 0).nonzero().flatten()
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = mask.bits[mask.rows[masked], :, None]
    allowed = ((bits >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[masked] = logits[masked].masked_fill(~allowed, _NEVER)


def apply_penalties(logits: torch.Tensor, counts: TokenCounts) -> None:
    """Make earlier tokens less (or more) likely. logits: [S, V] fp32, finite or -inf; mutated.

    x > 0 is divided by repetition, other x multiplied; then frequency * count is subtracted, and
    presence where count > 0. In float64, rounded once to fp32; what was finite stays finite.
    Sources: Keskar et al. 2019, https://arxiv.org/abs/1909.05858; OpenAI's API reference.
    """
    rows, entries = _entries(counts.starts, counts.sizes)
    at = (rows, counts.token_ids[entries])
    seen = counts.output_counts[entries]
    before = logits[at]
    x = before.double()
    repetition = counts.repetition[rows]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - counts.frequency[rows] * seen
    x = x - counts.presence[rows] * (seen > 0)
    limit = torch.finfo(torch.float32).max
    logits[at] = torch.where(before == _NEVER, before, x.clamp(-limit, limit).float())


def _entries(starts: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The row of every entry, and where the entry lies; both [sum of sizes] int64."""
    rows = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    entries = torch.arange(len(rows), device=sizes.device) - first + starts[rows]
    return rows, entries
