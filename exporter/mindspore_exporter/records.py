"""The immutable records that cross from the training thread to the worker.

A record is made in a hook and holds times, numbers and references, never decoded values. All times named `*_at` are
`time.monotonic()` seconds; `wall` is `time.time()` seconds, taken at the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from .learning_rate import LearningRates


@dataclass(frozen=True, slots=True)
class RunBegan:
    """A call of `Model.train` (or a hand-written loop) began: what is known before its first step.

    `first_step` is the global step already done; `planned` the global step at which the run will be done, None when
    unknown. `train_cell` names the classes of the train cell, most derived first, and decides how its outputs are read.
    `rates` is the optimiser's `learning_rate.LearningRates`, `schedule_step` the optimiser's own step number at the begin;
    both are None where there is no optimiser.
    """

    at: float
    wall: float
    first_step: int
    planned: int | None
    steps_per_epoch: int | None
    first_epoch: int
    sink: bool
    steps_per_record: int
    train_cell: tuple[str, ...]
    rates: LearningRates | None
    schedule_step: int | None


@dataclass(frozen=True, slots=True)
class CompileBegan:
    """The first step (or the build) of a graph began."""

    at: float
    wall: float


class StepRecord(NamedTuple):
    """One callback at the end of a step, or of a sink of `steps` steps.

    `step` is the global step. `began_at` is the begin of the step; `others_seconds` the time that other callbacks took
    since the end of the previous record, `hook_seconds` the time of our own hooks. `outputs` is what
    `decode.retain` kept of the train cell's outputs (None: not read in this step); `immediate` the same outputs' numbers
    read in the hook, where they were. `samples` and `tokens` are this rank's share of the record, None when unknown.
    `compiled`: the record's first step compiled the graph.

    A named tuple, because it is made in every step: a frozen dataclass sets its fields one by one and takes 4.5 us for
    these, a tuple 0.9 us.
    """

    step: int
    steps: int
    epoch: int | None
    began_at: float
    ended_at: float
    wall: float
    others_seconds: float
    hook_seconds: float
    outputs: Any
    immediate: tuple[float, ...] | None
    samples: float | None
    tokens: float | None
    network_training: bool | None
    learning_rate: float | None
    compiled: bool


@dataclass(frozen=True, slots=True)
class RecordedValues:
    """Outputs of a hand-written loop, by name; numbers or tensors."""

    losses: dict[str, Any]
    learning_rates: tuple[Any, ...]
    gradient_norm: Any
    parameter_norm: Any
    update_ratio: Any
    loss_scale: Any
    overflow: Any


@dataclass(frozen=True, slots=True)
class CheckpointBegan:
    """A checkpoint is being written, in the training thread."""

    at: float
    wall: float
    step: int


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    """The training thread goes on. `file` is set while an asynchronous save still has to make that file whole."""

    at: float
    wall: float
    step: int
    failed: bool
    file: str | None = None


@dataclass(frozen=True, slots=True)
class CheckpointWhole:
    """An asynchronous save's file is whole (or never came to be)."""

    at: float
    wall: float
    step: int
    failed: bool


@dataclass(frozen=True, slots=True)
class EvaluationBegan:
    """An evaluation began, inside a training or alone."""

    at: float
    wall: float
    step: int


@dataclass(frozen=True, slots=True)
class EvaluationEnded:
    """An evaluation ended; `values` maps the metric's name to a number or a tensor."""

    at: float
    wall: float
    step: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    """A phase that only its owner can name: `loading`, `paused`, or back to `training`."""

    at: float
    wall: float
    phase: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The outermost `__exit__` ran, or a signal came. `reason` is one of `metrics.END_REASONS`; `after_nonfinite` is the
    reason where the last step's loss or gradient norm was not finite, which only the worker knows. `tentative`: a
    `sys.exit()`, which may come from a handler of the user's own for a signal that is told a moment later."""

    at: float
    wall: float
    reason: str
    after_nonfinite: str
    tentative: bool = False


Record: TypeAlias = (
    RunBegan
    | CompileBegan
    | StepRecord
    | CheckpointBegan
    | CheckpointEnded
    | CheckpointWhole
    | EvaluationBegan
    | EvaluationEnded
    | PhaseChanged
    | RunEnded
)
