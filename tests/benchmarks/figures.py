"""Statistics of the bench: medians, percentiles, intervals by bootstrap."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 2000


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, by linear interpolation. Raises ValueError for none."""
    if not values:
        raise ValueError("a percentile of no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interval(values: Sequence[float], share: float = 0.95) -> tuple[float, float]:
    """Interval of the mean of paired values, by bootstrap over the pairs with a fixed seed."""
    draw = random.Random(20240)
    means = [statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(means, (1 - share) / 2), percentile(means, (1 + share) / 2)
