"""Statistics of the bench: percentiles, and intervals of paired values by bootstrap."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

RESAMPLES = 2000

Statistic = Callable[[Sequence[float]], float]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the values lie, by linear interpolation. Raises ValueError for no values
    and for a share outside 0..1."""
    if not values:
        raise ValueError("a percentile of no values")
    if not 0 <= share <= 1:
        raise ValueError(f"a share is between 0 and 1, got {share}")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interval(values: Sequence[float], statistic: Statistic, share: float = 0.95) -> tuple[float, float]:
    """Interval of `statistic` of paired values, by bootstrap over the pairs with a fixed seed: resampled by block, because
    steps of one block share its noise. Raises ValueError for fewer than two pairs, which have no interval."""
    if len(values) < 2:
        raise ValueError(f"an interval needs at least two pairs, got {len(values)}")
    draw = random.Random(20240)
    seen = [statistic(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return percentile(seen, (1 - share) / 2), percentile(seen, (1 + share) / 2)


def paired_differences(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Ours less bare, pair by pair. Raises ValueError where a block has no partner."""
    return [one - other for one, other in zip(ours, bare, strict=True)]


def paired_ratios(ours: Sequence[float], bare: Sequence[float]) -> list[float]:
    """Ours by bare, pair by pair. Raises ValueError where a block has no partner."""
    return [one / other for one, other in zip(ours, bare, strict=True)]


median: Statistic = statistics.median
mean: Statistic = statistics.fmean
