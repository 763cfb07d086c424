"""The one registry of a process: values of the catalogue's families, and their rendering.

A store of our own stands between the catalogue and `prometheus_client`'s exposition because a page must be one moment's
truth: the worker writes a step's families in one transaction, a value that became unknown is removed (the client's
metric objects cannot be absent and present in turn), and an inherited PROMETHEUS_MULTIPROC_DIR must not change the
class of every metric. The text itself is written by `prometheus_client`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest as text_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest

from . import metrics
from .metrics import Family, Labels

log = logging.getLogger(__name__)

Samples = dict[Labels, float]


class _Distribution:
    """Cumulative state of one histogram or summary: buckets (not cumulated), sum, count."""

    __slots__ = ("buckets", "count", "total")

    def __init__(self, bounds: int) -> None:
        self.buckets = [0] * (bounds + 1)
        self.total = 0.0
        self.count = 0


class Registry:
    """Values of this process's metric families.

    Every writer calls `set`, `add`, `observe`, `state`, `info` or `remove`, inside `transaction()` where several
    families must change together. Thread-safe. Values are in the family's base unit.
    """

    def __init__(self, constant_labels: Mapping[str, str], clock: Callable[[], float] = time.time) -> None:
        self._constant = dict(constant_labels)
        self._clock = clock
        self._lock = threading.RLock()
        self._values: dict[str, Samples] = {}
        self._distributions: dict[str, _Distribution] = {}
        self._named: set[tuple[str, Labels]] = set()
        self.activate(*metrics.RANK_GROUPS)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Writers that must be seen together hold this; a page is rendered before or after it, never between."""
        with self._lock:
            yield

    def constant_labels(self, labels: Mapping[str, str]) -> None:
        """Replace the labels that every series carries (`run`, `rank`)."""
        with self._lock:
            self._constant = dict(labels)

    def activate(self, *groups: str) -> None:
        """Let the counters, histograms and summaries of the groups exist at 0, for each label value they can have."""
        with self._lock:
            for family in metrics.CATALOGUE.values():
                if family.group not in groups:
                    continue
                if family.kind == "counter" and (family.values or not family.labels):
                    samples = self._values.setdefault(family.name, {})
                    keys: list[Labels] = [(value,) for value in family.values]
                    for key in keys or [()]:
                        samples.setdefault(key, 0.0)
                elif family.kind in ("histogram", "summary") and family is not metrics.DATA_WAIT_SECONDS:
                    self._distributions.setdefault(family.name, _Distribution(len(family.buckets)))

    def set(self, family: Family, value: float | None, *labels: str) -> None:
        """Set a gauge (or, for a source that counts itself, a counter). `None`, and NaN or infinity where the family
        does not allow it, remove the series: absent beats wrong."""
        if value is None or not (family.nan_allowed or math.isfinite(value)):
            self.remove(family, *labels)
            return
        with self._lock:
            samples = self._values.setdefault(family.name, {})
            if labels not in samples and not self._admitted(family, samples, labels):
                return
            samples[labels] = value

    def add(self, family: Family, amount: float, *labels: str) -> None:
        """Add to a counter. Raises ValueError for a negative amount."""
        if amount < 0:
            raise ValueError(f"{family.name}: a counter cannot be decreased, got {amount}")
        with self._lock:
            samples = self._values.setdefault(family.name, {})
            if labels not in samples and not self._admitted(family, samples, labels):
                return
            samples[labels] = samples.get(labels, 0.0) + amount

    def observe(self, family: Family, value: float, count: int = 1) -> None:
        """Add `count` observations of `value` to a histogram or summary."""
        with self._lock:
            distribution = self._distributions.get(family.name)
            if distribution is None:
                distribution = self._distributions[family.name] = _Distribution(len(family.buckets))
            distribution.buckets[bisect_left(family.buckets, value)] += count
            distribution.total += value * count
            distribution.count += count

    def observe_all(self, family: Family, values: Sequence[tuple[float, int]]) -> None:
        """Add observations, each a value and how often it was seen, to a histogram or summary."""
        with self._lock:
            for value, count in values:
                self.observe(family, value, count)

    def state(self, family: Family, state: str | None) -> None:
        """Put a state set into one of its states, or (None) make it absent."""
        if state is not None and state not in family.values:
            raise ValueError(f"{family.name} has no state {state!r}; allowed: {', '.join(family.values)}")
        with self._lock:
            if state is None:
                self._values.pop(family.name, None)
            else:
                self._values[family.name] = {(value,): float(value == state) for value in family.values}

    def info(self, family: Family, values: Mapping[str, str] | None) -> None:
        """Set an info metric: exactly the family's labels, value 1. `None` removes it."""
        with self._lock:
            if values is None:
                self._values.pop(family.name, None)
            else:
                self._values[family.name] = {tuple(values.get(label, "") for label in family.labels): 1.0}

    def remove(self, family: Family, *labels: str) -> None:
        """Make one series absent."""
        with self._lock:
            samples = self._values.get(family.name)
            if samples is not None:
                samples.pop(labels, None)

    def clear(self, family: Family) -> None:
        """Make all series of a family absent."""
        with self._lock:
            self._values.pop(family.name, None)
            self._distributions.pop(family.name, None)

    def value(self, family: Family, *labels: str) -> float | None:
        """Current value of one series (of a distribution: its sum), None when absent."""
        with self._lock:
            if family.name in self._distributions:
                return self._distributions[family.name].total
            return self._values.get(family.name, {}).get(labels)

    def count(self, family: Family) -> int:
        """Observations of a histogram or summary so far."""
        with self._lock:
            distribution = self._distributions.get(family.name)
            return 0 if distribution is None else distribution.count

    def _admitted(self, family: Family, samples: Samples, labels: Labels) -> bool:
        if len(labels) != len(family.labels):
            raise ValueError(f"{family.name} has the labels {family.labels}, got the values {labels}")
        if family.cap is None or len(samples) < family.cap:
            return True
        if (family.name, labels) not in self._named and len(self._named) < 1024:
            self._named.add((family.name, labels))
            dropped = self._values.setdefault(metrics.SERIES_DROPPED.name, {})
            dropped[()] = dropped.get((), 0.0) + 1
            log.warning(
                "%s: at most %d values of %s are exported, %r is dropped",
                family.name,
                family.cap,
                "/".join(family.labels),
                "/".join(labels),
            )
        return False

    # --- rendering ------------------------------------------------------------------------------------------------

    def collect(self, profile: str = "full", groups: Collection[str] = ()) -> list[Metric]:
        """The page as `prometheus_client` metrics, of one moment. `groups` empty means all."""
        lean = profile == "lean"
        with self._lock:
            self._values[metrics.TIME.name] = {(): self._clock()}
            names = self._constant.keys()
            constant = tuple(self._constant.values())
            page = []
            for family in metrics.CATALOGUE.values():
                if groups and family.group not in groups:
                    continue
                metric = self._metric(family, lean, tuple(names), constant)
                if metric is not None and metric.samples:
                    page.append(metric)
            return page

    def render(self, openmetrics: bool = False, profile: str = "full", groups: Collection[str] = ()) -> bytes:
        """The page as text, in the Prometheus or the OpenMetrics format."""
        write: Callable[[_Page], bytes] = openmetrics_latest if openmetrics else text_latest
        return write(_Page(self.collect(profile, groups)))

    def series(self, profile: str = "full") -> int:
        """Number of series on the page."""
        return sum(len(metric.samples) for metric in self.collect(profile))

    def _metric(self, family: Family, lean: bool, names: Labels, constant: Labels) -> Metric | None:
        if lean and family.lean is False:
            return None
        if not lean and family is metrics.DEVICE_HEALTH_LEVEL:
            return None
        name = family.name
        if family.kind in ("histogram", "summary"):
            return self._distribution_metric(family, lean, dict(zip(names, constant, strict=True)))
        samples = self._values.get(name)
        if not samples:
            return None
        kind = {"stateset": "gauge", "info": "info"}.get(family.kind, family.kind)
        base = name.removesuffix("_total") if kind == "counter" else name.removesuffix("_info")
        metric = Metric(base if kind in ("counter", "info") else name, family.help, kind)
        label_names = names + family.labels
        if lean and family.lean_sum:
            metric.add_sample(name, dict(zip(names, constant, strict=True)), sum(samples.values()))
            return metric
        keep = family.lean if lean and not isinstance(family.lean, bool) else None
        for labels, value in samples.items():
            if keep is None or labels[0] in keep:
                metric.add_sample(name, dict(zip(label_names, constant + labels, strict=True)), value)
        return metric

    def _distribution_metric(self, family: Family, lean: bool, labels: dict[str, str]) -> Metric | None:
        distribution = self._distributions.get(family.name)
        if distribution is None:
            return None
        # Without buckets a histogram would be refused by the OpenMetrics parser: in lean it is a summary.
        metric = Metric(family.name, family.help, "summary" if lean else family.kind)
        if family.kind == "histogram" and not lean:
            cumulated = 0
            for bound, count in zip((*family.buckets, math.inf), distribution.buckets, strict=True):
                cumulated += count
                le = "+Inf" if math.isinf(bound) else repr(bound)
                metric.add_sample(family.name + "_bucket", {**labels, "le": le}, cumulated)
        metric.add_sample(family.name + "_count", labels, distribution.count)
        metric.add_sample(family.name + "_sum", labels, distribution.total)
        return metric


class _Page:
    """What the exposition functions need of a registry: an iterable of metrics."""

    def __init__(self, page: list[Metric]) -> None:
        self._page = page

    def collect(self) -> list[Metric]:
        return self._page
