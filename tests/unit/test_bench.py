"""The bench's statistics, and its verdict."""

from __future__ import annotations

import pytest

from benchmarks.figures import interval, percentile
from benchmarks.run import bar


def test_a_percentile_lies_between_the_values_around_it() -> None:
    values = [5.0, 1.0, 2.0, 4.0, 3.0]
    assert (percentile(values, 0.0), percentile(values, 0.5), percentile(values, 1.0)) == (1.0, 3.0, 5.0)
    assert percentile(values, 0.875) == pytest.approx(4.5)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_the_interval_holds_the_mean_and_is_the_same_in_each_call() -> None:
    values = [0.99, 1.0, 1.01, 1.02, 0.98] * 10
    low, high = interval(values)
    assert low < 1.0 < high
    assert high - low < 0.02
    assert (low, high) == interval(values)


def test_a_missed_bar_says_so_and_by_how_much() -> None:
    assert bar("hook", 14.0, 15, "us") == "| hook | 15 us | 14.0 us | held |"
    assert bar("hook", 16.5, 15, "us") == "| hook | 15 us | 16.5 us | missed, **missed by 1.5 us** |"
