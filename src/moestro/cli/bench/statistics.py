"""Order statistics of measured times."""

import math
import random
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours (numpy's own).

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return percentile(values, 0.5)


def median_interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The 95% bootstrap interval of the median: the same for the same values.

    Raises ValueError without values.
    """
    source = random.Random(0)
    medians = [median(source.choices(values, k=len(values))) for _ in range(draws)]
    return percentile(medians, 0.025), percentile(medians, 0.975)
