"""Alternating measurement: who answers when, which rounds count, and what they add up to.

A round asks every engine once, in an order that rotates from round to round, and measures the
machine before and after. With two engines that is an alternating pair. A round in which the
machine's read bandwidth changed by more than 15% is dropped and counted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moestro.cli.bench.statistics import median, median_interval

MOST_CHANGE = 0.15


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of each engine's answer, and bytes a second before and after."""

    seconds: Mapping[str, float]
    before: float
    after: float

    @property
    def is_steady(self) -> bool:
        """Whether the machine was the same before and after."""
        return abs(self.after - self.before) <= MOST_CHANGE * max(self.before, self.after)

    @property
    def bandwidth(self) -> float:
        """Bytes a second: the mean of both."""
        return (self.before + self.after) / 2


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: each engine is first, second, ... equally often."""
    at = turn % len(names)
    return [*names[at:], *names[:at]]


def measure_rounds(
    ask: Callable[[str], float],
    names: Sequence[str],
    bandwidth: Callable[[], float],
    pairs: int,
) -> Iterator[Round]:
    """Rounds until `pairs` are steady, half as many more at most. ask(name) returns seconds."""
    steady, before = 0, bandwidth()
    for turn in range(pairs + (pairs + 1) // 2):
        seconds = {name: ask(name) for name in rotated(names, turn)}
        after = bandwidth()
        made = Round(seconds, before, after)
        yield made
        before = after
        steady += made.is_steady
        if steady == pairs:
            return


def summary(
    rounds: Sequence[Round],
    ours: str,
    tokens: Mapping[str, int],
    bounds: Mapping[str, Callable[[float], float]],
) -> dict[str, Any]:
    """What the steady rounds say: of each engine its rate, its share of the bound, and our ratio.

    tokens: how many an answer of each engine makes; bounds: seconds that its work takes at least,
    given bytes a second. Where no round was steady all count, and `unsteady` says so.
    """
    kept = [r for r in rounds if r.is_steady]
    unsteady = not kept
    used = list(rounds) if unsteady else kept
    engines: dict[str, Any] = {}
    for name in sorted(used[0].seconds, key=lambda name: name != ours):
        rates = [tokens[name] / r.seconds[name] for r in used]
        told: dict[str, Any] = {"tokens_per_s": median(rates), "rates": rates}
        if name in bounds:
            shares = [bounds[name](r.bandwidth) / r.seconds[name] for r in used]
            told["share_of_bound"] = median(shares)
        if name != ours:
            ratios = [r.seconds[name] / tokens[name] * tokens[ours] / r.seconds[ours] for r in used]
            told["ratio"] = median(ratios)
            told["ratio_95"] = list(median_interval(ratios))
        engines[name] = told
    return {
        "engines": engines,
        "pairs": len(used),
        "dropped": len(rounds) - len(kept),
        "unsteady": unsteady,
        "bandwidth_bytes_per_s": median([r.bandwidth for r in used]),
    }
