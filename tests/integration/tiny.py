"""A tiny real training for the integration tests: MindSpore on CPU, a dense network, a regression that converges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model
from mindspore.train.callback import Callback
from prometheus_client.parser import text_string_to_metric_families

from mindspore_exporter import PrometheusMonitor
from mindspore_exporter.exporter import TrainingExporter

BATCH = 4


class Rows:
    """`rows` pairs (x, y) with y linear in x; the same in every run."""

    def __init__(self, rows: int = 32, poison: int | None = None) -> None:
        random = np.random.default_rng(7)
        self.x = random.normal(size=(rows, 8)).astype(np.float32)
        self.y = (self.x @ random.normal(size=(8, 1))).astype(np.float32)
        if poison is not None:
            self.y[poison] = np.nan

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]

    def __len__(self) -> int:
        return len(self.x)


def dataset(rows: int = 32, batch: int = BATCH, poison: int | None = None, drop_remainder: bool = True) -> Any:
    """Batches of `Rows`, in order; `poison` is a row whose label is NaN."""
    source = GeneratorDataset(Rows(rows, poison), ["x", "y"], shuffle=False)
    return source.batch(batch, drop_remainder=drop_remainder)


def network() -> Any:
    """A small dense network with fixed weights."""
    ms.set_seed(3)
    return nn.SequentialCell(nn.Dense(8, 16), nn.Tanh(), nn.Dense(16, 1))


def model(learning_rate: Any = 0.01, mode: int = ms.GRAPH_MODE, **arguments: Any) -> Any:
    """A model ready for `train`, in graph (0) or PyNative (1) mode."""
    ms.set_context(mode=mode, device_target="CPU")
    net = network()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate, 0.9)
    return Model(net, nn.MSELoss(), optimizer, **arguments)


def monitor(**settings: Any) -> PrometheusMonitor:
    """A monitor on a port of the system's choice."""
    return PrometheusMonitor(None, **{"port": 0, "listen": "127.0.0.1", "run": "tiny", "signals": False, **settings})


class Page:
    """The present page of an exporter, as `page["family", "labelvalue"]`; None where a series is absent."""

    def __init__(self, exporter: TrainingExporter, profile: str = "full") -> None:
        assert exporter.worker.flush(20.0), "the worker did not publish in time"
        text = exporter.registry.render(profile=profile).decode()
        self.text = text
        self.samples = {
            (
                sample.name,
                *(value for name, value in sorted(sample.labels.items()) if name not in ("run", "rank")),
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __getitem__(self, key: str | tuple[str, ...]) -> float | None:
        return self.samples.get(key if isinstance(key, tuple) else (key,))

    @property
    def phase(self) -> str:
        (phase,) = [key[1] for key, value in self.samples.items() if key[0] == "mindspore_train_phase" and value == 1]
        return phase

    @property
    def end_reason(self) -> str | None:
        reasons = [key[1] for key in self.samples if key[0] == "mindspore_train_end_timestamp_seconds"]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None


class AtEachStep(Callback):
    """Calls `look(params)` at the end of each step."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look

    def on_train_step_end(self, run_context: Any) -> None:
        self.look(run_context.original_args())


def callbacks(*all_of_them: Any) -> Sequence[Any]:
    return list(all_of_them)
