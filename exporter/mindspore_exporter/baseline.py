"""What a run is compared with: learnt from its own first steps, or saved from another run.

`mindspore-exporter baseline save --from http://host:19440/metrics --out llm-7b.json` saves the baseline of a running rank
for `baseline: {from: llm-7b.json}` of a later run.
"""

from __future__ import annotations

import argparse
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from . import metrics
from .detectors import SPIKE_DEVIATIONS, Observation
from .errors import ConfigError
from .fileio import write_atomically

FORMAT = "mindspore-exporter baseline 1"
MAX_BYTES = 64 * 1024
FETCH_SECONDS = 10.0
MAX_PAGE_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Baseline:
    """Typical values of a run; None where the run did not have them.

    `loss_stddev` is that of the detrended loss, `step_seconds` and `gradient_norm` are medians, `samples_per_second` is
    one rank's share, `utilization` a ratio from 0 to 1.
    """

    loss_mean: float | None = None
    loss_stddev: float | None = None
    loss_max: float | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    gradient_norm: float | None = None
    utilization: float | None = None


class BaselineLearner:
    """Learns a baseline from `steps` records after `warmup_steps` records; `baseline` is None until then."""

    def __init__(self, steps: int, warmup_steps: int) -> None:
        self.baseline: Baseline | None = None
        self._steps = steps
        self._skip = warmup_steps
        self._seen = 0
        self._losses: list[tuple[float, float]] = []
        self._norms: list[float] = []
        self._seconds: list[float] = []
        self._samples: list[tuple[float, float]] = []

    def observe(self, o: Observation) -> None:
        """Take one record in."""
        if self.baseline is not None:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        self._seen += 1
        if not o.overflow:
            if o.loss is not None and math.isfinite(o.loss):
                self._losses.append((o.step, o.loss))
            if o.gradient_norm is not None and math.isfinite(o.gradient_norm):
                self._norms.append(o.gradient_norm)
        if o.step_seconds is not None:
            self._seconds.append(o.step_seconds)
            if o.samples is not None:
                self._samples.append((o.samples, o.step_seconds * o.steps))
        if self._seen >= self._steps:
            self.baseline = self._learnt()
            self._losses, self._norms, self._seconds, self._samples = [], [], [], []

    def _learnt(self) -> Baseline:
        losses = without_outliers(self._losses)
        values = [loss for _, loss in losses]
        residuals = detrended(losses)
        seconds = sum(spent for _, spent in self._samples)
        return Baseline(
            loss_mean=fmean(values) if values else None,
            loss_stddev=stdev(residuals) if len(residuals) > 1 else None,
            loss_max=max(values) if values else None,
            step_seconds=median(self._seconds) if self._seconds else None,
            samples_per_second=sum(samples for samples, _ in self._samples) / seconds if seconds > 0 else None,
            gradient_norm=median(self._norms) if self._norms else None,
        )


def detrended(points: list[tuple[float, float]]) -> list[float]:
    """What is left of the values over the steps when their straight line (least squares) is taken off."""
    if len(points) < 2:
        return [0.0 for _ in points]
    x0, y0 = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - x0) ** 2 for x, _ in points)
    slope = sum((x - x0) * (y - y0) for x, y in points) / spread if spread > 0 else 0.0
    return [y - y0 - slope * (x - x0) for x, y in points]


def without_outliers(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points whose distance from the median is within 10 median absolute deviations (all, where those are 0)."""
    if not points:
        return []
    middle = median(y for _, y in points)
    deviation = median(abs(y - middle) for _, y in points)
    if deviation == 0:
        return points
    return [(x, y) for x, y in points if abs(y - middle) <= SPIKE_DEVIATIONS * deviation]


# --- files and pages ----------------------------------------------------------------------------------------------------


def to_data(baseline: Baseline) -> dict[str, float]:
    """Plain data of what is known."""
    return {name: value for name, value in asdict(baseline).items() if value is not None}


def from_data(data: Any, where: str) -> Baseline:
    """The baseline in plain data. Raises ConfigError that names `where`, key and value."""
    allowed = [field.name for field in fields(Baseline)]
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: the baseline must have keys and values, has a {type(data).__name__}")
    for name, value in data.items():
        if name not in allowed:
            raise ConfigError(f"{where}: no key {name!r} in a baseline; allowed: {', '.join(allowed)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(f"{where}: {name} = {value!r}; allowed: a finite number")
        if not name.startswith("loss_m") and value < 0:
            raise ConfigError(f"{where}: {name} = {value!r}; allowed: 0 and above")
    return Baseline(**{name: float(value) for name, value in data.items()})


def load(path: Path) -> Baseline:
    """Read a file written by `save`. Raises ConfigError: file, key, value, what is allowed."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"baseline.from = {str(path)!r} cannot be read: {error.strerror}; allowed: 'self', or a file"
            " written by 'mindspore-exporter baseline save'"
        ) from None
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, which no baseline is")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{path}: is not a baseline; its format must be {FORMAT!r}")
    return from_data(data.get("baseline"), str(path))


def save(baseline: Baseline, path: Path, *, run: str) -> None:
    """Write a baseline atomically. Raises OSError."""
    data = {"format": FORMAT, "run": run, "baseline": to_data(baseline)}
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode(), 0o644)


def from_page(text: str) -> tuple[str, Baseline]:
    """Run and baseline on a rank's page (full profile). Raises ConfigError where it has none yet."""
    found: dict[str, float] = {}
    run = ""
    names = {
        metrics.BASELINE_STEP_SECONDS.name: "step_seconds",
        metrics.BASELINE_SAMPLES.name: "samples_per_second",
        metrics.BASELINE_GRADIENT_NORM.name: "gradient_norm",
        metrics.BASELINE_UTILIZATION.name: "utilization",
    }
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                run = sample.labels.get("run", run)
                if sample.name == metrics.BASELINE_LOSS.name:
                    found[f"loss_{sample.labels['stat']}"] = sample.value
                elif sample.name in names:
                    found[names[sample.name]] = sample.value
    except (ValueError, KeyError) as error:
        raise ConfigError(f"the page is not a Prometheus page: {error}") from None
    if "step_seconds" not in found:
        raise ConfigError("the page has no baseline yet: it is learnt from the first records after warm-up")
    return run, from_data(found, "the page")


# --- the program --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mindspore-exporter baseline`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    saving = actions.add_parser("save", help="save the baseline of a running rank")
    saving.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="URL",
        help="the rank's page, for example http://host:19440/metrics",
    )
    saving.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to write it")


def main(arguments: argparse.Namespace) -> int:
    """Save the baseline of a running rank. Raises ConfigError where there is none to be had."""
    run, baseline = from_page(_fetch(arguments.source))
    try:
        save(baseline, arguments.out, run=run)
    except OSError as error:
        raise ConfigError(f"{arguments.out}: cannot be written: {error.strerror}") from None
    print(f"{arguments.out}: baseline of run {run}")  # noqa: T201 - a program's output
    return 0


def _fetch(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--from = {url!r}; allowed: the URL of a rank's page, http://... or https://...")
    try:
        with urllib.request.urlopen(url, timeout=FETCH_SECONDS) as answer:  # noqa: S310 - http and https only, see above
            return str(answer.read(MAX_PAGE_BYTES).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ConfigError(f"{url}: cannot be fetched: {getattr(error, 'reason', error)}") from None
