"""Specification of `detectors.py`, against plain statistics."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspore_exporter.detectors import SPIKE_MINIMUM, Detectors, Observation, Window, slope_per_1000_steps


def seen(step: int, loss: float | None = None, **changes: object) -> Observation:
    values: dict[str, object] = {
        "step": step,
        "steps": 1,
        "loss": loss,
        "gradient_norm": None,
        "step_seconds": None,
        "samples": None,
        "overflow": False,
    }
    return Observation(**{**values, **changes})  # type: ignore[arg-type]


def fed(losses: list[float], window: int = 100) -> Detectors:
    detectors = Detectors(window)
    for step, loss in enumerate(losses, 1):
        detectors.observe(seen(step, loss))
    return detectors


FLOATS = st.floats(-1e6, 1e6)


@given(st.lists(FLOATS, min_size=1, max_size=300), st.integers(10, 60))
def test_a_window_has_the_statistics_of_its_last_values(values: list[float], size: int) -> None:
    window = Window(size)
    for value in values:
        window.add(value)
    last = values[-size:]
    assert list(window.values) == last
    assert window.mean == pytest.approx(statistics.fmean(last), rel=1e-9, abs=1e-6)
    assert window.median == pytest.approx(statistics.median(last))
    assert (window.smallest, window.largest) == (min(last), max(last))
    assert window.stddev() == pytest.approx(statistics.stdev(last) if len(last) > 1 else 0.0, rel=1e-6, abs=1e-6)


@given(st.lists(FLOATS, min_size=21, max_size=21), FLOATS)
def test_a_spike_is_above_ten_deviations_and_five_percent(values: list[float], value: float) -> None:
    window = Window(30)
    for each in values:
        window.add(each)
    middle = statistics.median(values)
    deviation = statistics.median(abs(each - middle) for each in values)
    excess = value - middle
    border = math.isclose(excess, 10 * deviation, rel_tol=1e-9, abs_tol=1e-9)
    if not border:
        assert window.is_spike(value) == (excess > 10 * deviation and excess > 0.05 * abs(middle))


def test_the_running_mean_does_not_drift_over_a_million_values() -> None:
    window, draw = Window(100), random.Random(1)
    for _ in range(1_000_000):
        window.add(draw.choice([1e9, 1e-9]))
    assert window.mean == pytest.approx(statistics.fmean(window.values), rel=1e-12)


def test_an_incomplete_window_judges_no_spike() -> None:
    detectors = Detectors()
    for step in range(1, SPIKE_MINIMUM + 1):
        assert detectors.observe(seen(step, 1.0)) == ()
    assert detectors.observe(seen(99, 100.0)) == ("spike:loss",)


@pytest.mark.parametrize("level", [-2.0, 0.001, 0.0, 50.0])
def test_a_spike_is_seen_at_any_level_of_the_loss(level: float) -> None:
    draw = random.Random(2)
    noise = [level + draw.gauss(0, 0.01) for _ in range(100)]
    detectors = Detectors()
    events = [event for step, loss in enumerate(noise) for event in detectors.observe(seen(step, loss))]
    assert events == []
    assert detectors.observe(seen(101, level + 10.0)) == ("spike:loss",)


def test_a_constant_loss_needs_five_percent_to_spike() -> None:
    detectors = fed([2.0] * 50)
    assert detectors.observe(seen(51, 2.09)) == ()
    assert detectors.observe(seen(52, 2.11)) == ("spike:loss",)


def test_a_falling_loss_has_no_spikes() -> None:
    detectors = Detectors()
    assert [e for step in range(1000) for e in detectors.observe(seen(step, 10.0 / (1 + step / 50)))] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_stays_out_of_the_window(value: float) -> None:
    detectors = fed([1.0] * 30)
    assert detectors.observe(seen(31, value, gradient_norm=value)) == ("nonfinite:loss", "nonfinite:gradient_norm")
    assert detectors.report().loss_mean == 1.0


def test_a_step_that_the_scaler_skipped_is_neither_counted_nor_taken_in() -> None:
    detectors = fed([1.0] * 30)
    assert detectors.observe(seen(31, math.inf, gradient_norm=math.nan, overflow=True)) == ()
    assert detectors.report().loss_max == 1.0


def test_the_best_is_the_lowest_mean_of_a_whole_window_and_steps_since_it_count() -> None:
    detectors = fed([5.0, 1.0, 1.0], window=10)
    assert detectors.report().loss_best is None  # three lucky losses are no window
    detectors = fed([3.0] * 10 + [2.0] * 10 + [4.0] * 7, window=10)
    report = detectors.report()
    assert (report.loss_best, report.steps_since_best) == (2.0, 7)


def test_small_gradients_count_consecutive_steps_and_a_sink_counts_all_of_its_steps() -> None:
    detectors = Detectors(gradient_norm_floor=1e-6)
    assert detectors.report().small_gradient_steps is None
    for step, norm in enumerate([1.0, 1e-7, 1e-8]):
        detectors.observe(seen(step, gradient_norm=norm))
    assert detectors.report().small_gradient_steps == 2
    detectors.observe(seen(50, gradient_norm=0.0, steps=50))
    assert detectors.report().small_gradient_steps == 52
    detectors.observe(seen(51, gradient_norm=math.nan))
    assert detectors.report().small_gradient_steps == 0


def test_the_usual_time_is_that_of_a_record_not_of_a_step() -> None:
    detectors = Detectors()
    for step in range(50, 1000, 50):
        detectors.observe(seen(step, step_seconds=0.1, steps=50))
    assert detectors.report().usual_record_seconds == pytest.approx(5.0)


@pytest.mark.parametrize("slope", [-0.002, 0.0, 0.0005])
def test_the_slope_is_per_thousand_steps_and_outliers_do_not_bend_it(slope: float) -> None:
    steps = list(range(1, 101))
    losses = [2.0 + slope * step for step in steps]
    losses[40] = losses[90] = 50.0
    assert slope_per_1000_steps(steps, losses) == pytest.approx(1000 * slope, abs=1e-6)


def test_no_slope_of_too_few_values_or_of_a_step_that_stands_still() -> None:
    assert slope_per_1000_steps([1, 2], [1.0, 2.0]) is None
    assert slope_per_1000_steps([7] * 40, [1.0] * 40) is None
    assert fed([1.0]).report().loss_stddev is None
    assert Detectors().report().loss_mean is None


def test_a_spike_of_the_step_time_is_counted() -> None:
    detectors = Detectors()
    for step in range(40):
        detectors.observe(seen(step, step_seconds=0.1 + step % 3 / 1000))
    assert detectors.observe(seen(41, step_seconds=1.0)) == ("spike:step_seconds",)
