"""The monitors that are compared: ours, MindSpore's, MindSpore Transformers', and the two that people write first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from mindspore.train import LossMonitor, SummaryCollector
from mindspore.train.callback import Callback
from prometheus_client import CollectorRegistry, Gauge

from mindspore_exporter import PrometheusMonitor


class JsonLines(Callback):
    """Appends a JSON line and flushes it, in every step."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = path.open("w")

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.file.write(json.dumps({"step": params.cur_step_num, "loss": float(params.net_outputs.asnumpy())}) + "\n")
        self.file.flush()


class Gauges(Callback):
    """Sets Prometheus gauges in the hook."""

    def __init__(self) -> None:
        super().__init__()
        registry = CollectorRegistry()
        self.step = Gauge("step", "Step.", registry=registry)
        self.loss = Gauge("loss", "Loss.", registry=registry)

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        self.step.set(params.cur_step_num)
        self.loss.set(float(params.net_outputs.asnumpy()))


class Timed(Callback):
    """Passes every hook on and times those around a step, in nanoseconds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.took: list[int] = []
        self._began = 0

    def __enter__(self) -> Timed:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def on_train_begin(self, run_context: Any) -> None:
        self.inner.on_train_begin(run_context)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self.inner.on_train_epoch_begin(run_context)

    def on_train_step_begin(self, run_context: Any) -> None:
        began = perf_counter_ns()
        self.inner.on_train_step_begin(run_context)
        self._began = perf_counter_ns() - began

    def on_train_step_end(self, run_context: Any) -> None:
        began = perf_counter_ns()
        self.inner.on_train_step_end(run_context)
        self.took.append(self._began + perf_counter_ns() - began)

    def on_train_epoch_end(self, run_context: Any) -> None:
        self.inner.on_train_epoch_end(run_context)

    def on_train_end(self, run_context: Any) -> None:
        self.inner.on_train_end(run_context)


class Ends(Callback):
    """Notes when each step ended, in seconds; the last callback of every list, the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.at.append(perf_counter_ns() / 1e9)


def alternating(directory: Path) -> dict[str, Any]:
    """The monitors that leave the process as it was, by their names in the table; "none" does nothing."""
    return {
        "none": Callback(),
        "PrometheusMonitor": PrometheusMonitor(None, port=0, listen="127.0.0.1", run="bench", signals=False),
        "LossMonitor": LossMonitor(1),
        "JSON line, flushed": JsonLines(directory / "lines.json"),
        "gauges in the hook": Gauges(),
    }


def summary_collector(directory: Path, steps: int) -> Any:
    """MindSpore's SummaryCollector in every step. It changes the graph. Its lineage is off: MindSpore 2.9 cannot write that
    with the protobuf that is installed with it today."""
    off = dict.fromkeys(
        ("collect_graph", "collect_dataset_graph", "collect_train_lineage", "collect_eval_lineage"), False
    )
    return SummaryCollector(str(directory / "summary"), collect_freq=1, collect_specified_data=off)


def transformers_monitor(directory: Path, steps: int) -> Any:
    """MFLossMonitor as the Trainer makes it, for one epoch of `steps` steps. It sets the parallel context in each step,
    after which every step of the process is slower, its own and those without it."""
    os.environ["LOCAL_DEFAULT_PATH"] = str(directory)
    from mindformers.core.callback.callback import MFLossMonitor

    return MFLossMonitor(
        learning_rate=0.01, per_print_times=1, origin_epochs=1, dataset_size=steps, global_batch_size=8
    )


LASTING = {"SummaryCollector(1)": summary_collector, "MFLossMonitor": transformers_monitor}
"""Monitors that change the process for good: each is measured in one of its own, after the blocks without it."""
