"""What is known of the ranks: asked from Prometheus, or where there is none from the endpoints themselves."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from .. import metrics

RUN = "demo"
RATE_SECONDS = 10
"""Time that speeds are averaged over."""
STEP_SUM, STEP_COUNT = metrics.STEP_SECONDS.name + "_sum", metrics.STEP_SECONDS.name + "_count"
SCALARS = (
    metrics.STEP.name,
    metrics.STEPS.name,
    metrics.SAMPLES.name,
    metrics.LAST_STEP_TIMESTAMP.name,
    STEP_SUM,
    STEP_COUNT,
)
LABELLED = {metrics.LOSS.name: ("component", "total"), metrics.LEARNING_RATE.name: ("group", "0")}
"""Of families with several series, the one that the demo looks at."""
FAMILIES = (*SCALARS, *LABELLED, metrics.PHASE.name)


@dataclass(frozen=True)
class Scrape:
    """What one scrape said of one rank: `values` by series name, seconds and nats; a series that was absent is absent."""

    time: float
    phase: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One rank's row of the live table. None is unknown; step time in seconds."""

    phase: str
    step: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None


class View(Protocol):
    """A source of what the ranks report."""

    name: str
    did: str
    """What the source did with the numbers, as in "Prometheus stored"."""

    def rows(self) -> dict[int, Row]:
        """The present row of each rank that is seen."""

    def scrapes(self) -> dict[int, list[Scrape]]:
        """Everything stored of each rank, oldest first."""


@dataclass
class _Partial:
    phase: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def take(self, name: str, labels: Mapping[str, str], value: float) -> None:
        if name == metrics.PHASE.name:
            if value == 1:
                self.phase = labels["phase"]
        elif name in SCALARS or (name in LABELLED and labels.get(LABELLED[name][0]) == LABELLED[name][1]):
            self.values[name] = value

    def row(self, samples_per_second: float | None, step_seconds: float | None) -> Row:
        return Row(
            self.phase or "-",
            self.values.get(metrics.STEP.name),
            self.values.get(metrics.LOSS.name),
            self.values.get(metrics.LEARNING_RATE.name),
            samples_per_second,
            step_seconds,
        )


class PrometheusView:
    """Asks a Prometheus server; `url` without a path. Raises OSError or ValueError when it does not answer."""

    name, did = "Prometheus", "Prometheus stored"

    def __init__(self, url: str) -> None:
        self.url = url
        self._began = time.time()

    def rows(self) -> dict[int, Row]:
        window = f'{{run="{RUN}"}}[{RATE_SECONDS}s]'
        samples = self._by_rank(f"rate({metrics.SAMPLES.name}{window})")
        steps = self._by_rank(f"rate({STEP_SUM}{window}) / (rate({STEP_COUNT}{window}) > 0)")
        ranks: defaultdict[int, _Partial] = defaultdict(_Partial)
        for series in self._query(_selector()):
            labels = series["metric"]
            ranks[int(labels["rank"])].take(labels["__name__"], labels, float(series["value"][1]))
        return {rank: seen.row(samples.get(rank), steps.get(rank)) for rank, seen in ranks.items()}

    def scrapes(self) -> dict[int, list[Scrape]]:
        seconds = int(time.time() - self._began) + 10
        scrapes: defaultdict[int, defaultdict[float, _Partial]] = defaultdict(lambda: defaultdict(_Partial))
        for series in self._query(f"{_selector()}[{seconds}s]"):
            labels = series["metric"]
            for moment, text in series["values"]:
                # Series of one scrape have its time: what the page said together comes together again.
                scrapes[int(labels["rank"])][moment].take(labels["__name__"], labels, float(text))
        return {
            rank: [Scrape(moment, seen.phase, seen.values) for moment, seen in sorted(moments.items())]
            for rank, moments in scrapes.items()
        }

    def _by_rank(self, expression: str) -> dict[int, float]:
        return {int(series["metric"]["rank"]): float(series["value"][1]) for series in self._query(expression)}

    def _query(self, expression: str) -> list[Any]:
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:  # noqa: S310 - our own http address
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{expression}: {error.read().decode(errors='replace')[:300]}") from None


def _selector() -> str:
    return f'{{__name__=~"{"|".join(FAMILIES)}",run="{RUN}"}}'


class EndpointView:
    """Scrapes the endpoints that the ranks announced in `directory`, and keeps what it saw."""

    name, did = "the endpoints", "the endpoints showed"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: defaultdict[int, list[Scrape]] = defaultdict(list)
        self._recent: defaultdict[int, deque[Scrape]] = defaultdict(lambda: deque(maxlen=RATE_SECONDS))

    def rows(self) -> dict[int, Row]:
        rows = {}
        for path in sorted(self._directory.glob("*.json")):
            try:
                rank, page = self._scrape(path)
            except (OSError, ValueError, KeyError):
                continue  # not announced whole yet, busy compiling, or gone: the next look tells
            now = time.time()
            scrape = Scrape(now, page.phase, page.values)
            self._seen[rank].append(scrape)
            self._recent[rank].append(scrape)
            rows[rank] = page.row(*speeds(self._recent[rank][0], scrape))
        return rows

    def scrapes(self) -> dict[int, list[Scrape]]:
        return dict(self._seen)

    def _scrape(self, path: Path) -> tuple[int, _Partial]:
        (group,) = json.loads(path.read_text(encoding="utf-8"))
        request = urllib.request.Request(
            f"http://{group['targets'][0]}/metrics",
            # Who announces a timeout is a scraper, and a rank that ends waits for its scrapers.
            headers={"User-Agent": "mindspore-exporter-demo", "X-Prometheus-Scrape-Timeout-Seconds": "1"},
        )
        with urllib.request.urlopen(request, timeout=1) as answer:  # noqa: S310 - an http address of this machine
            text = answer.read().decode()
        return int(group["labels"]["__meta_mindspore_rank"]), page(text)


def page(text: str) -> _Partial:
    """What the demo looks at on one page of a rank."""
    seen = _Partial()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            seen.take(sample.name, sample.labels, sample.value)
    return seen


def speeds(first: Scrape, last: Scrape) -> tuple[float | None, float | None]:
    """Samples per second and mean step time between two scrapes; None where nothing happened between them."""

    def grown(name: str) -> float:
        return last.values.get(name, 0.0) - first.values.get(name, 0.0)

    seconds, steps = last.time - first.time, grown(STEP_COUNT)
    return (
        grown(metrics.SAMPLES.name) / seconds if seconds > 0 else None,
        grown(STEP_SUM) / steps if steps > 0 else None,
    )
