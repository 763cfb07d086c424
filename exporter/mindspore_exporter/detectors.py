"""Windows, spikes and slopes: what Prometheus cannot see between two scrapes.

Every record is observed, none is sampled away. Pure: no clock, no thread, no metric; whether something is an alert is
decided by the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

Event = Literal["nonfinite:loss", "nonfinite:gradient_norm", "spike:loss", "spike:gradient_norm", "spike:step_seconds"]

SPIKE_MINIMUM = 20
"""Values that a window needs before it judges: the median absolute deviation of fewer is noise."""
SPIKE_DEVIATIONS = 10.0
SPIKE_SHARE = 0.05
"""A spike is above the median by 10 median absolute deviations and 5 % of its size (design, metric catalogue)."""
SLOPE_POINTS = 32
"""Points of the slope: the window is thinned to so many, whose 496 pairs are the price of a robust slope."""


class Observation(NamedTuple):
    """One record's numbers.

    `loss` and `gradient_norm` are None where they are not valid or not known here. `overflow`: the loss scaler skipped the
    step; its values are neither counted as non-finite nor taken into a window. `step_seconds` is the time of one step,
    None for an interval that holds a checkpoint, an evaluation or a compile. `samples` is this rank's share. A named tuple,
    because one is made of each record: a frozen dataclass takes three times as long.
    """

    step: int
    steps: int
    loss: float | None
    gradient_norm: float | None
    step_seconds: float | None
    samples: float | None
    overflow: bool


@dataclass(frozen=True, slots=True)
class Report:
    """The detectors' present state; None where too little was seen."""

    loss_mean: float | None
    loss_stddev: float | None
    loss_min: float | None
    loss_max: float | None
    loss_slope: float | None
    loss_best: float | None
    steps_since_best: int | None
    gradient_norm_window_max: float | None
    small_gradient_steps: int | None
    usual_record_seconds: float | None


class Window:
    """The last `size` finite values, in order of arrival and sorted."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []
        self._total = 0.0
        self._since_summed = 0

    def __len__(self) -> int:
        return len(self.values)

    @property
    def full(self) -> bool:
        """Whether it holds as many values as it can."""
        return len(self.values) == self.values.maxlen

    def add(self, value: float) -> None:
        """Take a finite value in and, when full, the oldest one out."""
        if self.full:
            oldest = self.values[0]
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._total -= oldest
        self.values.append(value)
        insort(self._sorted, value)
        self._total += value
        self._since_summed += 1
        if self._since_summed >= len(self.values):
            # Once a window the running sum starts afresh: its rounding errors do not add up over a month of steps.
            self._total, self._since_summed = math.fsum(self.values), 0

    @property
    def mean(self) -> float:
        return self._total / len(self.values)

    @property
    def smallest(self) -> float:
        return self._sorted[0]

    @property
    def largest(self) -> float:
        return self._sorted[-1]

    @property
    def median(self) -> float:
        half, odd = divmod(len(self._sorted), 2)
        return self._sorted[half] if odd else (self._sorted[half - 1] + self._sorted[half]) / 2

    def is_spike(self, value: float) -> bool:
        """Whether `value`, not yet in the window, stands out above it by both bounds.

        `value` is above 10 median absolute deviations just when over half of the window lies closer to the median than a
        tenth of the excess: two look-ups in the sorted window instead of a sort of deviations.
        """
        if len(self.values) < SPIKE_MINIMUM:
            return False
        middle = self.median
        excess = value - middle
        if excess <= SPIKE_SHARE * abs(middle):
            return False
        near = excess / SPIKE_DEVIATIONS
        closer = bisect_left(self._sorted, middle + near) - bisect_right(self._sorted, middle - near)
        return 2 * closer > len(self._sorted)

    def stddev(self) -> float:
        """Standard deviation of the sample; 0 of a single value."""
        if len(self.values) < 2:
            return 0.0
        mean = math.fsum(self.values) / len(self.values)
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


class Detectors:
    """Observes every record of one rank; `report` gives the present state.

    `window` is the number of records looked back on; `gradient_norm_floor` the norm under which a step counts as a
    small-gradient step. `observe` costs some microseconds, `report` some hundred.
    """

    def __init__(self, window: int = 100, gradient_norm_floor: float = 1e-6) -> None:
        self._losses = Window(window)
        self._loss_steps: deque[int] = deque(maxlen=window)
        self._norms = Window(window)
        self._seconds = Window(window)
        self._floor = gradient_norm_floor
        self._best: float | None = None
        self._best_step = 0
        self._small: int | None = None
        self._step = 0
        self._steps_per_record = 1

    def observe(self, o: Observation) -> tuple[Event, ...]:
        """Take one record in; gives what was counted at it."""
        events: list[Event] = []
        self._step, self._steps_per_record = o.step, o.steps
        if not o.overflow:
            if o.loss is not None:
                self._observe_loss(o.loss, o.step, events)
            if o.gradient_norm is not None:
                self._observe_norm(o.gradient_norm, o.steps, events)
        if o.step_seconds is not None:
            if self._seconds.is_spike(o.step_seconds):
                events.append("spike:step_seconds")
            self._seconds.add(o.step_seconds)
        return tuple(events)

    def _observe_loss(self, loss: float, step: int, events: list[Event]) -> None:
        if not math.isfinite(loss):
            events.append("nonfinite:loss")
            return
        window = self._losses
        if window.is_spike(loss):
            events.append("spike:loss")
        window.add(loss)
        self._loss_steps.append(step)
        # Only whole windows compete: the mean of a few lucky losses would never be reached again.
        if window.full and (self._best is None or window.mean < self._best):
            self._best, self._best_step = window.mean, step

    def _observe_norm(self, norm: float, steps: int, events: list[Event]) -> None:
        if not math.isfinite(norm):
            events.append("nonfinite:gradient_norm")
            self._small = 0
            return
        if self._norms.is_spike(norm):
            events.append("spike:gradient_norm")
        self._norms.add(norm)
        self._small = (self._small or 0) + steps if norm < self._floor else 0

    def report(self) -> Report:
        """The present state."""
        losses, seen = self._losses, len(self._losses) > 0
        return Report(
            loss_mean=losses.mean if seen else None,
            loss_stddev=losses.stddev() if len(losses) > 1 else None,
            loss_min=losses.smallest if seen else None,
            loss_max=losses.largest if seen else None,
            loss_slope=slope_per_1000_steps(list(self._loss_steps), list(losses.values)),
            loss_best=self._best,
            steps_since_best=None if self._best is None else self._step - self._best_step,
            gradient_norm_window_max=self._norms.largest if len(self._norms) else None,
            small_gradient_steps=self._small,
            usual_record_seconds=self._seconds.median * self._steps_per_record if len(self._seconds) else None,
        )


def slope_per_1000_steps(steps: list[int], losses: list[float]) -> float | None:
    """Theil-Sen slope (the median of the slopes of all pairs) of losses over steps, times 1,000.

    None for under 20 values or where the step does not advance. Long windows are averaged into `SLOPE_POINTS` points
    first: single outliers are still outvoted, and the price stays under a millisecond.
    """
    if len(losses) < SPIKE_MINIMUM:
        return None
    size = -(-len(losses) // SLOPE_POINTS)
    points = [
        (sum(steps[i : i + size]) / len(steps[i : i + size]), sum(losses[i : i + size]) / len(losses[i : i + size]))
        for i in range(0, len(losses), size)
    ]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
        if later[0] != earlier[0]
    ]
    return 1000.0 * median(slopes) if slopes else None
