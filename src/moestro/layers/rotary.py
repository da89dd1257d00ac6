"""Rotary embedding rows: cos and sin of every position, default and YaRN frequencies."""

import math

import torch

from moestro.core.model_spec import RopeSpec
from moestro.core.plan import ROTARY_BLOCK_POSITIONS
from moestro.errors import UnsupportedError


class RotaryTable:
    """cos | sin rows [position, D] in fp32, shared by all layers.

    The table grows in blocks of ROTARY_BLOCK_POSITIONS absolute positions, each computed the same
    way whenever it is needed, so that a row never depends on the table's size or on the batch.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device | str) -> None:
        if head_dim % 2:
            raise UnsupportedError(f"head_dim must be even for rotary embedding, got {head_dim}.")
        self._inv_freq = rotary_frequencies(rope, head_dim)
        self._factor = rope.attention_factor
        self._table = torch.empty(0, head_dim, dtype=torch.float32, device=device)

    def rows(self, positions: torch.Tensor, limit: int) -> torch.Tensor:
        """Rows of positions [T] int64, all below `limit`: [T, D] fp32, cos half then sin half."""
        starts = range(self._table.shape[0], limit, ROTARY_BLOCK_POSITIONS)
        if starts:
            blocks = [self._block(start).to(self._table.device) for start in starts]
            self._table = torch.cat((self._table, *blocks))
        return self._table.index_select(0, positions)

    def _block(self, start: int) -> torch.Tensor:
        """Rows of ROTARY_BLOCK_POSITIONS positions from start.

        The angle is the fp32 product of position and frequency, as both model families were
        trained; its cos and sin are taken in fp64 and rounded, so that no vectorised fp32
        approximation shows.
        """
        position = torch.arange(start, start + ROTARY_BLOCK_POSITIONS, dtype=torch.float32)
        angles = (position[:, None] * self._inv_freq).double()
        rows = torch.cat((angles.cos(), angles.sin()), dim=-1) * self._factor
        return rows.float()


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Angle per position of each of the D / 2 pairs, [D / 2] fp32.

    default: theta^(-2 i / D). yarn: a ramp from these (fast pairs) to these / factor (slow ones).
    Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071, evaluated as HF does (fp32 tensors,
    bounds in double). Raises UnsupportedError for another rope_type.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    periods = rope.theta**exponents
    if rope.rope_type == "default":
        return 1.0 / periods
    if rope.rope_type != "yarn":
        raise UnsupportedError(
            f"rope_type must be default or yarn, got {rope.rope_type!r}; other kinds of scaling "
            "are not implemented."
        )
    keep = 1 - _yarn_ramp(rope, head_dim)
    return 1.0 / (rope.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_ramp(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """How far each pair is interpolated, 0 to 1: [D / 2] fp32."""
    low = _pair_with_rotations(rope, head_dim, rope.beta_fast)
    high = _pair_with_rotations(rope, head_dim, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pair = torch.arange(head_dim // 2, dtype=torch.float32)
    return ((pair - low) / (high - low)).clamp(0, 1)


def _pair_with_rotations(rope: RopeSpec, head_dim: int, rotations: float) -> float:
    """The (fractional) pair that turns `rotations` times over the original context."""
    context = rope.original_max_position_embeddings
    turns = math.log(context / (rotations * 2 * math.pi))
    return head_dim * turns / (2 * math.log(rope.theta))
