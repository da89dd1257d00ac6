"""What a run does when, as functions of the share of its tokens already seen.

Nothing depends on the clock, so a resumed run repeats what an undisturbed one does.
"""

from dataclasses import dataclass

_LENGTHS = ((0.40, 256), (0.65, 512), (0.95, 1024), (0.98, 4096), (1.0, 8192))
"""(until this share, sequence length): short sequences learn the language cheaply, the last few
percent teach long context."""
_WARMUP = 0.01
_DECAY_FROM = 0.5
_FLOOR = 0.02
_BALANCE_UNTIL = 0.9
_BALANCE_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Schedule:
    """total_tokens of the run, tokens of one step, longest sequence."""

    total_tokens: int
    tokens_per_step: int
    max_length: int

    def batch_shape(self, seen_tokens: int) -> tuple[int, int]:
        """(sequences, length) of the next step."""
        share = seen_tokens / self.total_tokens
        length = next((n for until, n in _LENGTHS if share < until), _LENGTHS[-1][1])
        length = min(length, self.max_length)
        return max(1, self.tokens_per_step // length), length

    def lr_factor(self, seen_tokens: int) -> float:
        """Warm-up, a flat half, then a line down to the floor."""
        share = seen_tokens / self.total_tokens
        if share < _WARMUP:
            return (share + 1e-3) / (_WARMUP + 1e-3)
        if share < _DECAY_FROM:
            return 1.0
        return max(_FLOOR, (1 - share) / (1 - _DECAY_FROM))

    def balance_rate(self, seen_tokens: int) -> float:
        """Step of expert_bias; it rests at the end, so that the router settles on it."""
        return _BALANCE_RATE if seen_tokens < _BALANCE_UNTIL * self.total_tokens else 0.0
