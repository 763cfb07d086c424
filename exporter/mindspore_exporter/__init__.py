"""Prometheus metrics of a MindSpore training, from inside every rank.

    from mindspore_exporter import PrometheusMonitor
    model.train(epochs, dataset, callbacks=[PrometheusMonitor("monitor.yaml")])

    from mindspore_exporter import TrainingExporter      # hand-written loops
    with TrainingExporter() as exporter:
        with exporter.step(samples=32) as step:
            step.record(loss=loss)

Importing the package does not import MindSpore; `PrometheusMonitor` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ConfigError, ExporterError

if TYPE_CHECKING:
    from .callback import PrometheusMonitor
    from .exporter import TrainingExporter

__version__ = "0.1.0"

__all__ = ["ConfigError", "ExporterError", "PrometheusMonitor", "TrainingExporter", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "PrometheusMonitor":
        from .callback import PrometheusMonitor

        return PrometheusMonitor
    if name == "TrainingExporter":
        from .exporter import TrainingExporter

        return TrainingExporter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
