"""The monitors that are compared: ours, MindSpore's, MindSpore Transformers', and the two that people write first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import mindspore as ms
from mindspore.train import LossMonitor, SummaryCollector
from mindspore.train.callback import Callback
from prometheus_client import CollectorRegistry, Gauge

from mindspore_exporter import PrometheusMonitor

OURS = "PrometheusMonitor"


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


class Nothing(Callback):
    """Does nothing: the block that the others are compared with, and what the timer itself costs."""


class Timed:
    """Times the two hooks around a step of one monitor, in nanoseconds, while it is entered.

    The methods are replaced on the instance: the monitor itself stays in the list of callbacks, where it and the others
    look for it.
    """

    HOOKS = ("on_train_step_begin", "on_train_step_end")

    def __init__(self, monitor: Any) -> None:
        self.took: list[int] = []
        """Begin and end hook of one step together."""
        self._monitor = monitor

    def __enter__(self) -> Timed:
        began_hook, ended_hook = (getattr(self._monitor, name) for name in self.HOOKS)
        spent, took = 0, self.took

        def begin(run_context: Any) -> None:
            nonlocal spent
            began = perf_counter_ns()
            began_hook(run_context)
            spent = perf_counter_ns() - began

        def end(run_context: Any) -> None:
            began = perf_counter_ns()
            ended_hook(run_context)
            took.append(spent + perf_counter_ns() - began)

        for name, hook in zip(self.HOOKS, (begin, end), strict=True):
            setattr(self._monitor, name, hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self.HOOKS:
            self._monitor.__dict__.pop(name, None)


class Ends(Callback):
    """Notes when each step ended, in seconds; the last callback of every list, the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[float] = []

    def on_train_step_end(self, run_context: Any) -> None:
        self.at.append(perf_counter_ns() / 1e9)


def ours() -> PrometheusMonitor:
    """PrometheusMonitor as a user makes it, on a port of the system's choice."""
    return PrometheusMonitor(None, port=0, listen="127.0.0.1", run="bench", signals=False)


def all_of_them(directory: Path, steps: int) -> dict[str, Any]:
    """The monitors by their names in the table, files under `directory`; `steps` are those of one `train` call."""
    return {
        "none": Nothing(),
        OURS: ours(),
        "LossMonitor": LossMonitor(1),
        "MFLossMonitor": transformers_monitor(steps),
        "SummaryCollector(1)": summary_collector(directory),
        "JSON line, flushed": JsonLines(directory / "lines.json"),
        "gauges in the hook": Gauges(),
    }


def summary_collector(directory: Path) -> Any:
    """MindSpore's SummaryCollector in every step. Graph and lineage are off: MindSpore 2.9 cannot write them with the
    protobuf that is installed with it today."""
    off = dict.fromkeys(
        ("collect_graph", "collect_dataset_graph", "collect_train_lineage", "collect_eval_lineage"), False
    )
    return SummaryCollector(str(directory / "summary"), collect_freq=1, collect_specified_data=off)


def transformers_monitor(steps: int) -> Any:
    """MFLossMonitor as the Trainer makes it, for one epoch of `steps` steps."""
    from mindformers.core.callback.callback import MFLossMonitor

    return MFLossMonitor(
        learning_rate=0.01, per_print_times=1, origin_epochs=1, dataset_size=steps, global_batch_size=8
    )


def build_transformers_context(mode: int, directory: Path) -> None:
    """Build MindSpore Transformers' context, as its Trainer does before anything else.

    Without it the first hook of MFLossMonitor builds a default one, which puts the process into PyNative mode: each step
    of a 1 ms graph then took 45 ms, with every monitor and with none.
    """
    os.environ["LOCAL_DEFAULT_PATH"] = str(directory)
    from mindformers import build_context

    build_context(
        {"context": {"mode": mode, "device_target": "CPU"}, "parallel": {}, "use_parallel": False, "use_legacy": True}
    )
    ms.set_context(mode=mode, device_target="CPU")
