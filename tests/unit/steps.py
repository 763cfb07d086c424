"""Records for the unit tests of what comes after the queue."""

from __future__ import annotations

from typing import Any

from mindspore_exporter.config import MonitorConfig, load
from mindspore_exporter.identity import Identity
from mindspore_exporter.pipeline import Pipeline
from mindspore_exporter.records import CompileBegan, RunBegan, StepRecord
from mindspore_exporter.registry import Registry

WALL = 1_700_000_000.0
IDENTITY = Identity("tiny", "", 0, 2, 0, "node1", None)


def pipeline(config: MonitorConfig | None = None, **arguments: Any) -> Pipeline:
    """A pipeline whose process started at 0."""
    return Pipeline(config or load(), IDENTITY, Registry(IDENTITY.constant_labels()), at=0.0, **arguments)


def began(first_step: int = 0, planned: int | None = 1000, **changes: Any) -> RunBegan:
    """The begin of a training at second 1."""
    values: dict[str, Any] = {
        "at": 1.0,
        "wall": WALL + 1,
        "first_step": first_step,
        "planned": planned,
        "steps_per_epoch": 10,
        "first_epoch": 1,
        "sink": False,
        "steps_per_record": 1,
        "train_cell": ("TrainOneStepCell", "Cell"),
        "rates": None,
        "schedule_step": None,
    }
    return RunBegan(**{**values, **changes})


def compile_began(at: float = 2.0) -> CompileBegan:
    return CompileBegan(at, WALL + at)


def step(number: int, outputs: Any = 1.0, **changes: Any) -> StepRecord:
    """The record of a step of one second, of which a quarter was waiting for data; step n ends at second 10 + n."""
    values: dict[str, Any] = {
        "step": number,
        "steps": 1,
        "epoch": 1,
        "began_at": 9.25 + number,
        "ended_at": 10.0 + number,
        "wall": WALL + 10 + number,
        "others_seconds": 0.0,
        "hook_seconds": 1e-5,
        "outputs": outputs,
        "immediate": None,
        "samples": 4.0,
        "tokens": None,
        "network_training": True,
        "learning_rate": None,
        "compiled": False,
    }
    return StepRecord(**{**values, **changes})


def publish(target: Pipeline) -> None:
    target.publish(WALL + 1000, queue_length=0, dropped=0, hook_errors=0)
