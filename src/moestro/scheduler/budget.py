"""SchedulerLimits, and TokenBudget: how many tokens one step may still compute."""

from dataclasses import dataclass, fields

from moestro.errors import ConfigError

_PREFILL_SHARE = 4
"""Decode rows that could fill every step leave one token in this many to waiting prefills."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs sequences run at once; max_num_batched_tokens tokens a step, may be smaller.

    max_steps_ahead: steps that may be planned while an earlier one is not updated yet.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_steps_ahead: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 0 if field.name == "max_steps_ahead" else 1
            if getattr(self, field.name) < least:
                raise ConfigError(
                    f"{field.name} must be at least {least}, got {getattr(self, field.name)}."
                )


class TokenBudget:
    """`left` tokens of the step being planned; taken in the order of planning.

    Decode goes first. Only when its rows would (nearly) fill the step is a quarter of it kept for
    prefill, saved up over steps when the budget is too small to divide: so prompts advance even
    under decodes without end, and decode keeps most of its speed.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._max_tokens = max_num_batched_tokens
        self._saved = 0
        self.left = max_num_batched_tokens

    def open_step(self) -> None:
        """Start planning a step with the full budget."""
        self.left = self._max_tokens

    def decode_limit(self, num_rows: int, prefill_waits: bool) -> int:
        """Tokens that `num_rows` decode rows may take before prefill has had its turn."""
        enough = max(1, self.left // _PREFILL_SHARE)
        if not prefill_waits or num_rows + enough <= self.left:
            return self.left
        share, self._saved = divmod(self._saved + self.left, _PREFILL_SHARE)
        return self.left - share

    def draft_limit(self, num_rows: int, prefill_waits: bool) -> int:
        """Drafts that `num_rows` decode rows may carry: what they and prefill's share leave."""
        kept = max(1, self._max_tokens // _PREFILL_SHARE) if prefill_waits else 0
        return max(0, self._max_tokens - num_rows - kept)
