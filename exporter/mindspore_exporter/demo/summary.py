"""The end of the demo: what was stored against what the run itself logged, rank by rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import metrics
from .views import STEP_COUNT, STEP_SUM, Scrape

RATE_TOLERANCE = 1e-6
"""Relative: the optimiser holds the learning rate as float32."""
TIME_TOLERANCE, TIME_FLOOR = 0.02, 0.002
"""2 % or 2 ms, whichever is more: two callbacks of one step look at the clock one after the other."""


@dataclass(frozen=True)
class LoggedStep:
    """One line of the run's own log; `time` Unix seconds, `clock` monotonic seconds, both at the end of the step."""

    step: int
    loss: float
    learning_rate: float
    samples: int
    time: float
    clock: float


@dataclass(frozen=True)
class Comparison:
    """One quantity of one rank: both values as they are shown, and whether they agree."""

    quantity: str
    stored: str
    logged: str
    agrees: bool
    verdict: str


def read_log(path: Path) -> list[LoggedStep]:
    """The run's own log of one rank; a last line that was cut is left out. Empty where there is no file."""
    if not path.exists():
        return []
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            steps.append(LoggedStep(**json.loads(line)))
    return steps


def compare(scrapes: Sequence[Scrape], log: Sequence[LoggedStep]) -> list[Comparison]:
    """One rank: the last scrape against the log's end, then every scrape against the log's line of the same step."""
    if not log:
        return [Comparison("own log", "-", "empty", False, "the rank logged no step")]
    if not scrapes:
        return [Comparison("scrapes", "none", f"{len(log)} steps", False, "nothing was stored")]
    last, values, end = scrapes[-1], scrapes[-1].values, log[-1]
    return [
        _whole("phase", last.phase, "finished"),
        _exact("step", values.get(metrics.STEP.name), end.step),
        _exact("steps in all", values.get(metrics.STEPS.name), len(log)),
        _exact("samples in all", values.get(metrics.SAMPLES.name), end.samples),
        _exact("last loss", values.get(metrics.LOSS.name), end.loss),
        _close("last learning rate", values.get(metrics.LEARNING_RATE.name), end.learning_rate),
        _mean_step_time(values, log),
        *_every_scrape(scrapes, log),
    ]


def _whole(quantity: str, stored: str, logged: str) -> Comparison:
    agrees = stored == logged
    return Comparison(quantity, stored or "-", logged, agrees, "equal" if agrees else "differs")


def _exact(quantity: str, stored: float | None, logged: float) -> Comparison:
    if stored is None:
        return Comparison(quantity, "-", f"{logged:.10g}", False, "nothing was stored")
    difference = 0.0 if math.isnan(stored) and math.isnan(logged) else abs(stored - logged)
    verdict = "equal" if difference == 0 else f"differs by {difference:.3g}"
    return Comparison(quantity, f"{stored:.10g}", f"{logged:.10g}", difference == 0, verdict)


def _close(quantity: str, stored: float | None, logged: float) -> Comparison:
    if stored is None:
        return _exact(quantity, stored, logged)
    agrees = math.isclose(stored, logged, rel_tol=RATE_TOLERANCE)
    verdict = "equal" if stored == logged else f"differs by {abs(stored - logged):.3g}"
    if agrees and stored != logged:
        verdict = "equal as float32"
    return Comparison(quantity, f"{stored:.7g}", f"{logged:.7g}", agrees, verdict)


def _mean_step_time(values: Mapping[str, float], log: Sequence[LoggedStep]) -> Comparison:
    """Mean time from the end of a step to the end of the next. The first interval begins at the end of the compile."""
    count, total = values.get(STEP_COUNT, 0.0), values.get(STEP_SUM, 0.0)
    if not count or len(log) < 2:
        agrees = not count and len(log) < 2
        return Comparison("mean step time", "-", f"{len(log)} steps", agrees, "no interval" if agrees else "differs")
    stored = total / count
    logged = (log[-1].clock - log[0].clock) / (len(log) - 1)
    agrees = abs(stored - logged) <= max(TIME_FLOOR, TIME_TOLERANCE * logged)
    verdict = "within 2 % or 2 ms" if agrees else f"differs by {abs(stored - logged) * 1000:.3g} ms"
    return Comparison("mean step time", f"{stored * 1000:.2f} ms", f"{logged * 1000:.2f} ms", agrees, verdict)


def _every_scrape(scrapes: Sequence[Scrape], log: Sequence[LoggedStep]) -> list[Comparison]:
    by_step = {line.step: line for line in log}
    seen = {step for scrape in scrapes if (step := _step(scrape)) in by_step}
    losses, rates, samples, times = [], [], [], []
    for scrape in scrapes:
        values = scrape.values
        line = by_step.get(_step(scrape))
        if line is None:
            continue  # before the first step
        losses.append(_difference(values.get(metrics.LOSS.name), line.loss))
        rates.append(_difference(values.get(metrics.LEARNING_RATE.name), line.learning_rate) / line.learning_rate)
        samples.append(_difference(values.get(metrics.SAMPLES.name), line.samples))
        times.append(_difference(values.get(metrics.LAST_STEP_TIMESTAMP.name), line.time))
    return [
        _worst("loss", losses, len(seen), 0.0, ""),
        _worst("learning rate", rates, len(seen), RATE_TOLERANCE, " relative"),
        _worst("samples", samples, len(seen), 0.0, ""),
        _worst("time of the step", times, len(seen), TIME_FLOOR, " s"),
    ]


def _difference(stored: float | None, logged: float) -> float:
    if stored is None:
        return math.inf
    return 0.0 if math.isnan(stored) and math.isnan(logged) else abs(stored - logged)


def _step(scrape: Scrape) -> int:
    return int(scrape.values.get(metrics.STEP.name, 0))


def _worst(quantity: str, differences: Sequence[float], steps: int, allowed: float, unit: str) -> Comparison:
    worst = max((math.inf if math.isnan(one) else one for one in differences), default=math.inf)
    agrees = worst <= allowed
    shown, of_steps = f"{len(differences)} scrapes", f"{steps} steps"
    verdict = f"largest difference {worst:.2g}{unit}" if differences else "no scrape saw a step"
    return Comparison(f"{quantity}, each scrape", shown, of_steps, agrees, verdict)


def text(comparisons: Mapping[int, Sequence[Comparison]], source: str) -> str:
    """The summary as it is printed. `source`: who did what, as in "Prometheus stored"."""
    rows = [f"{'rank':>4}  {'quantity':<30}{'stored':>14}{'logged':>14}   verdict"]
    for rank, of_rank in sorted(comparisons.items()):
        for one in of_rank:
            mark = "" if one.agrees else "  <-- DIFFERS"
            rows.append(f"{rank:>4}  {one.quantity:<30}{one.stored:>14}{one.logged:>14}   {one.verdict}{mark}")
    wrong = sum(not one.agrees for of_rank in comparisons.values() for one in of_rank)
    if wrong:
        rows.append(f"\nWhat {source} differs from what the run logged, in {wrong} places.")
    else:
        rows.append(f"\nWhat {source} is what the run logged, on all ranks: {len(comparisons)}.")
    return "\n".join(rows)


def agree(comparisons: Mapping[int, Sequence[Comparison]]) -> bool:
    """Whether every number of every rank agrees."""
    return all(one.agrees for of_rank in comparisons.values() for one in of_rank)
