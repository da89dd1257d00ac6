"""Rotary embedding rows: cos and sin of every position, default and YaRN frequencies."""

import math

import torch

from moestro.core.model_spec import RopeSpec
from moestro.core.plan import ROTARY_BLOCK_POSITIONS
from moestro.errors import UnsupportedError


class RotaryTable:
    """cos | sin rows [position, D] in fp32, shared by all layers.

    `reserve` sets the memory aside once, so that the table's address stays while captured graphs
    point to it; rows are computed when a step first needs them, in blocks of
    ROTARY_BLOCK_POSITIONS absolute positions, each the same way, so that a row never depends on
    the table's size or on the batch.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device | str) -> None:
        if head_dim % 2:
            raise UnsupportedError(f"head_dim must be even for rotary embedding, got {head_dim}.")
        self._inv_freq = rotary_frequencies(rope, head_dim)
        self._factor = rope.attention_factor
        self._table = torch.empty(0, head_dim, dtype=torch.float32, device=device)
        self._num_ready = 0

    def reserve(self, num_positions: int) -> None:
        """Memory for this many positions, touched as rows are computed; what is there moves,
        unless there is room already."""
        if num_positions <= len(self._table):
            return
        blocks = -(-num_positions // ROTARY_BLOCK_POSITIONS)
        table = self._table.new_empty(blocks * ROTARY_BLOCK_POSITIONS, self._table.shape[1])
        self._num_ready = min(self._num_ready, len(table))
        table[: self._num_ready] = self._table[: self._num_ready]
        self._table = table

    def up_to(self, limit: int) -> torch.Tensor:
        """The table [at least limit, D]: rows of positions below `limit` are ready, others not."""
        if limit > self._num_ready:
            if limit > len(self._table):
                self.reserve(limit)
            for start in range(self._num_ready, limit, ROTARY_BLOCK_POSITIONS):
                self._table[start : start + ROTARY_BLOCK_POSITIONS] = self._block(start)
                self._num_ready = start + ROTARY_BLOCK_POSITIONS
        return self._table

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
