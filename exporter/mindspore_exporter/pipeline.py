"""Records in, metrics out: decode, phases, detectors, registry, in this order, in the worker thread only."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import metrics
from .baseline import Baseline, BaselineLearner
from .config import MonitorConfig
from .decode import Decoded, Decoder
from .detectors import Detectors, Observation
from .identity import Identity
from .phases import Phases
from .records import (
    CheckpointBegan,
    CheckpointEnded,
    CheckpointWhole,
    CompileBegan,
    EvaluationBegan,
    EvaluationEnded,
    PhaseChanged,
    Record,
    RunBegan,
    RunEnded,
    StepRecord,
)
from .registry import Registry
from .state import RunState

log = logging.getLogger(__name__)

FINISHED_REASONS = ("finished", "stop_requested")
LAST_HOOKS = 100
"""Records that `mindspore_exporter_hook_max_seconds` looks back on."""


@dataclass(slots=True)
class _Totals:
    """Counts of this process's records: plain numbers, put into the registry when the page is published."""

    steps: int = 0
    samples: float = 0.0
    tokens: float = 0.0
    overflows: int = 0
    repeated: int = 0


class Pipeline:
    """Turns the records of one process into the registry's values.

    `handle` is called for every record in order, `tick` once a second or so, `publish` when the page should show the
    present state. Nothing here runs on the training thread.
    """

    def __init__(
        self,
        config: MonitorConfig,
        identity: Identity,
        registry: Registry,
        baseline: Baseline | None = None,
        *,
        late_read_failed: Callable[[], None] = lambda: None,
        at: float | None = None,
    ) -> None:
        self.config = config
        self.identity = identity
        self.registry = registry
        self.phases = Phases(time.monotonic() if at is None else at, time.time())
        self.detectors = Detectors(config.window, config.gradient_norm_floor)
        self.baseline = baseline
        self.errors = dict.fromkeys(metrics.ERROR_STAGES, 0)
        self.step = 0
        """Global step last done."""
        self.end_reason: str | None = None
        self.usual_record_seconds: float | None = None
        self._late_read_failed = late_read_failed
        self._learner = (
            BaselineLearner(config.baseline.steps, config.baseline.warmup_steps) if baseline is None else None
        )
        self._decoder = Decoder((), config.loss)
        self._plan: RunBegan | None = None
        self._schedule_steps = 0
        self._decoded: Decoded | None = None
        self._hook_rate: float | None = None
        self._hooks: deque[float] = deque(maxlen=LAST_HOOKS)
        self._totals = _Totals()
        self._last: StepRecord | None = None
        self._step_seconds: list[tuple[float, int]] = []
        self._data_waits: list[tuple[float, int]] = []
        self._hook_seconds: list[tuple[float, int]] = []
        self._last_nonfinite = False
        self._earlier_step = 0
        self._compile_seconds = 0.0
        self._last_record_at = self.phases.began_at
        self._compile_began: float | None = None
        self._checkpoint_began: dict[int, float] = {}
        self._longest_checkpoint = 0.0
        self._evaluation_began: float | None = None
        self._end: RunEnded | None = None
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            RunBegan: self._run_began,
            CompileBegan: self._compile_has_begun,
            StepRecord: self._step,
            CheckpointBegan: self._checkpoint_has_begun,
            CheckpointEnded: self._checkpoint_ended,
            CheckpointWhole: self._checkpoint_whole,
            EvaluationBegan: self._evaluation_has_begun,
            EvaluationEnded: self._evaluation_ended,
            PhaseChanged: self._phase_changed,
            RunEnded: self._run_ended,
        }
        self._first_page()

    # --- what comes in --------------------------------------------------------------------------------------------

    def handle(self, record: Record) -> None:
        """Take one record in. An error is counted and logged once a kind; the next record is taken as ever."""
        try:
            self._handlers[type(record)](record)
        except Exception:
            self.count_error("decode", f"a {type(record).__name__} could not be handled")

    def silent_for(self, at: float) -> float:
        """Seconds since the last step record."""
        return at - self._last_record_at

    def tick(self, at: float, activity: str) -> None:
        """Let the wall-time account go on while no record comes. `activity`: what the training thread is doing."""
        self.phases.tick(at, activity)

    def restore(self, state: RunState) -> None:
        """What an earlier attempt left: the attempt counts on, steps done before count as repeated, the baseline holds."""
        self._earlier_step = state.highest_step
        if state.baseline is not None and self.baseline is None:
            self.baseline, self._learner = state.baseline, None
        self.registry.set(metrics.ATTEMPT, state.attempt)

    def count_error(self, stage: str, what: str) -> None:
        """Count an error of the exporter; the first of a stage is logged with its traceback."""
        self.errors[stage] += 1
        if self.errors[stage] == 1:
            log.exception("exporter: %s; the training goes on, further errors of this kind are only counted", what)

    # --- the handlers of the records ------------------------------------------------------------------------------

    def _run_began(self, record: RunBegan) -> None:
        self._plan = record
        self._decoder = Decoder(record.train_cell, self.config.loss)
        self._schedule_steps = 0
        self._end = None
        if self.phases.phase in ("finished", "failed"):
            self.phases.enter("starting", record.at, record.wall)
        registry = self.registry
        with registry.transaction():
            registry.clear(metrics.END_TIMESTAMP)
            registry.set(metrics.RESUMED_STEP, record.first_step)
            registry.set(metrics.STEP, record.first_step)
            registry.set(metrics.STEPS_PLANNED, record.planned)
            registry.set(metrics.STEPS_PER_RECORD, record.steps_per_record)
        self.step, self.end_reason = record.first_step, None

    def _compile_has_begun(self, record: CompileBegan) -> None:
        self._compile_began = record.at
        self.phases.compile_began(record.at, record.wall)

    def _step(self, record: StepRecord) -> None:
        plan, self._last, self._last_record_at = self._plan, record, record.ended_at
        interval = self.phases.record(
            record.began_at,
            record.ended_at,
            record.wall,
            record.others_seconds,
            compiled=record.compiled,
            sink=plan.sink if plan else False,
        )
        decoded = self._read(record)
        overflow = bool(decoded and decoded.overflow)
        self._count(record, overflow)
        seconds = None
        if interval is not None:
            if interval.clean:
                seconds = interval.seconds / record.steps
                self._step_seconds.append((seconds, record.steps))
            if interval.data_wait is not None:
                self._data_waits.append((interval.data_wait, 1))
        if record.compiled and self._compile_began is not None:
            self._compile_seconds += record.ended_at - self._compile_began
            self._compile_began = None
        self._detect(record, decoded, overflow, seconds)
        self.step = record.step

    def _read(self, record: StepRecord) -> Decoded | None:
        self._hook_rate = record.learning_rate
        if record.outputs is None:
            return None
        if record.immediate is not None and not self._decoder.compare(record.outputs, record.immediate):
            self._late_read_failed()
            self.count_error("decode", "an output read by the worker differs from the one read at once")
            return None
        unknown = self._decoder.unknown
        self._decoded = self._decoder.decode(record.outputs)
        self.errors["decode"] += self._decoder.unknown - unknown
        return self._decoded

    def _count(self, record: StepRecord, overflow: bool) -> None:
        totals = self._totals
        # Records that the full queue dropped are bridged: their steps trained on as much as this record's.
        steps = record.step - self.step if record.step > self.step else record.steps
        totals.steps += steps
        share = steps / record.steps
        if record.samples is not None:
            totals.samples += record.samples * share
        if record.tokens is not None:
            totals.tokens += record.tokens * share
        if overflow:
            totals.overflows += 1
        if self._earlier_step:
            totals.repeated += max(0, min(record.step, self._earlier_step) - (record.step - steps))
        self._schedule_steps += steps - (1 if overflow else 0)
        self._hook_seconds.append((record.hook_seconds, 1))

    def _detect(self, record: StepRecord, decoded: Decoded | None, overflow: bool, seconds: float | None) -> None:
        observation = Observation(
            record.step,
            record.steps,
            decoded.losses.get("total") if decoded else None,
            decoded.gradient_norm if decoded else None,
            seconds,
            record.samples,
            overflow,
        )
        events = self.detectors.observe(observation)
        self._last_nonfinite = bool(events) and any(event.startswith("nonfinite") for event in events)
        for event in events:
            kind, quantity = event.split(":", 1)
            self.registry.add(metrics.NONFINITE if kind == "nonfinite" else metrics.SPIKES, 1, quantity)
        if self._learner is not None:
            self._learner.observe(observation)
            if self._learner.baseline is not None:
                self.baseline, self._learner = self._learner.baseline, None

    def _checkpoint_has_begun(self, record: CheckpointBegan) -> None:
        self._checkpoint_began[record.step] = record.at
        self.phases.enter("checkpointing", record.at, record.wall)

    def _checkpoint_ended(self, record: CheckpointEnded) -> None:
        self.phases.leave("checkpointing", record.at, record.wall)
        if record.file is None:
            self._checkpoint_done(record.step, record.at, record.wall, record.failed)

    def _checkpoint_whole(self, record: CheckpointWhole) -> None:
        self._checkpoint_done(record.step, record.at, record.wall, record.failed)

    def _checkpoint_done(self, step: int, at: float, wall: float, failed: bool) -> None:
        began = self._checkpoint_began.pop(step, at)
        registry = self.registry
        if failed:
            registry.add(metrics.CHECKPOINT_FAILURES, 1)
            return
        seconds = max(0.0, at - began)
        self._longest_checkpoint = max(self._longest_checkpoint, seconds)
        with registry.transaction():
            registry.set(metrics.CHECKPOINT_LAST_TIMESTAMP, wall)
            registry.set(metrics.CHECKPOINT_LAST_STEP, step)
            registry.set(metrics.CHECKPOINT_LAST_DURATION, seconds)
            registry.set(metrics.CHECKPOINT_LONGEST, self._longest_checkpoint)
            registry.observe(metrics.CHECKPOINT_SECONDS, seconds)

    def _evaluation_has_begun(self, record: EvaluationBegan) -> None:
        self._evaluation_began = record.at
        self.phases.enter("evaluating", record.at, record.wall)

    def _evaluation_ended(self, record: EvaluationEnded) -> None:
        self.phases.leave("evaluating", record.at, record.wall)
        registry = self.registry
        with registry.transaction():
            for name, value in record.values.items():
                registry.set(metrics.EVAL_VALUE, float(value), str(name)[:64])
            registry.set(metrics.EVAL_LAST_STEP, record.step)
            if self._evaluation_began is not None:
                registry.set(metrics.EVAL_LAST_DURATION, record.at - self._evaluation_began)

    def _phase_changed(self, record: PhaseChanged) -> None:
        if record.phase in ("loading", "paused"):
            self.phases.enter(record.phase, record.at, record.wall)
        else:
            self.phases.leave(self.phases.phase, record.at, record.wall)

    def _run_ended(self, record: RunEnded) -> None:
        # The first word counts: a signal that comes while a failed run tears down is not its reason.
        if self._end is not None and not self._end.tentative:
            return
        self._end = record
        self.registry.clear(metrics.END_TIMESTAMP)
        reason = record.after_nonfinite if self._last_nonfinite else record.reason
        self.phases.enter("finished" if reason in FINISHED_REASONS else "failed", record.at, record.wall)
        self.registry.set(metrics.END_TIMESTAMP, record.wall, reason)
        self.end_reason = reason

    # --- what goes out --------------------------------------------------------------------------------------------

    def _first_page(self) -> None:
        registry, identity = self.registry, self.identity
        with registry.transaction():
            registry.info(metrics.RANK_INFO, identity.info())
            registry.set(metrics.WORLD_SIZE, identity.world_size)
            registry.set(metrics.START_TIMESTAMP, self.phases.since_wall)
            if identity.rank == 0:
                for name, bound in self.config.thresholds.items():
                    registry.set(metrics.THRESHOLD, bound, name)
        self.publish(time.time(), queue_length=0, dropped=0, hook_errors=0)

    def publish(self, wall: float, *, queue_length: int, dropped: int, hook_errors: int) -> None:
        """Let the page show the present state, all of it at once."""
        self.errors["hook"] = hook_errors
        registry = self.registry
        with registry.transaction():
            registry.state(metrics.PHASE, self.phases.phase)
            registry.set(metrics.PHASE_START, self.phases.since_wall)
            for activity, seconds in self.phases.account.items():
                registry.set(metrics.ACTIVITY_SECONDS, seconds, activity)
            registry.set(metrics.COMPILE_SECONDS, self._compile_seconds)
            registry.set(metrics.QUEUE_LENGTH, queue_length)
            registry.set(metrics.RECORDS_DROPPED, dropped)
            for stage, count in self.errors.items():
                registry.set(metrics.ERRORS, count, stage)
            self._publish_distributions()
            registry.set(metrics.LAST_UPDATE, wall)
            self._publish_step()
            self._publish_report()
            self._publish_baseline()

    def _publish_distributions(self) -> None:
        registry = self.registry
        registry.observe_all(metrics.STEP_SECONDS, self._step_seconds)
        registry.observe_all(metrics.HOOK_SECONDS, self._hook_seconds)
        if self._data_waits:
            registry.observe_all(metrics.DATA_WAIT_SECONDS, self._data_waits)
        self._hooks.extend(seconds for seconds, _ in self._hook_seconds)
        if self._hooks:
            registry.set(metrics.HOOK_MAX_SECONDS, max(self._hooks))
        for observed in (self._step_seconds, self._hook_seconds, self._data_waits):
            observed.clear()

    def _publish_step(self) -> None:
        registry, totals, last = self.registry, self._totals, self._last
        if self._plan is not None:
            registry.set(metrics.STEP, self.step)
        registry.set(metrics.STEPS, totals.steps)
        registry.set(metrics.SAMPLES, totals.samples)
        registry.set(metrics.TOKENS, totals.tokens)
        registry.set(metrics.OVERFLOW_STEPS, totals.overflows)
        registry.set(metrics.REPEATED_STEPS, totals.repeated)
        if last is not None:
            registry.set(metrics.LAST_STEP_TIMESTAMP, last.wall)
            registry.set(metrics.EPOCH, last.epoch)
            training = last.network_training
            registry.set(metrics.NETWORK_TRAINING, None if training is None else float(training))
        decoded = self._decoded
        if decoded is not None:
            for component, value in decoded.losses.items():
                registry.set(metrics.LOSS, value, component)
            registry.set(metrics.LOSS_VALID, 1.0 if decoded.losses else None)
            registry.set(metrics.LOSS_SCALE, decoded.loss_scale)
            registry.set(metrics.GRADIENT_NORM, decoded.gradient_norm)
            registry.set(metrics.PARAMETER_NORM, decoded.parameter_norm)
            registry.set(metrics.UPDATE_RATIO, decoded.update_ratio)
        for group, rate in enumerate(self._learning_rates() or ()):
            registry.set(metrics.LEARNING_RATE, rate, str(group))

    def _learning_rates(self) -> tuple[float, ...] | None:
        """Rates of the step just done: what the train cell returned, what the hook read, else the closed form."""
        if self._decoded is not None and self._decoded.learning_rates:
            return self._decoded.learning_rates
        if self._hook_rate is not None:
            return (self._hook_rate,)
        plan = self._plan
        if plan is None or plan.rates is None or self._schedule_steps == 0:
            return None
        if plan.rates.changes_by_schedule:
            return plan.rates.at((plan.schedule_step or 0) + self._schedule_steps - 1)
        return plan.rates.read_live()

    def _publish_report(self) -> None:
        registry, report = self.registry, self.detectors.report()
        for stat, value in (
            ("mean", report.loss_mean),
            ("stddev", report.loss_stddev),
            ("min", report.loss_min),
            ("max", report.loss_max),
        ):
            registry.set(metrics.LOSS_WINDOW, value, stat)
        registry.set(metrics.LOSS_SLOPE, report.loss_slope)
        registry.set(metrics.LOSS_BEST, report.loss_best)
        registry.set(metrics.STEPS_SINCE_BEST, report.steps_since_best)
        registry.set(metrics.GRADIENT_NORM_WINDOW_MAX, report.gradient_norm_window_max)
        registry.set(metrics.SMALL_GRADIENT_STEPS, report.small_gradient_steps)
        stall = self.config.stall
        usual = report.usual_record_seconds or 0.0
        registry.set(metrics.STALL_TIMEOUT, max(stall.floor_seconds, stall.factor * usual))
        self.usual_record_seconds = report.usual_record_seconds

    def _publish_baseline(self) -> None:
        registry, baseline = self.registry, self.baseline
        if baseline is None:
            return
        for stat, value in (("mean", baseline.loss_mean), ("stddev", baseline.loss_stddev), ("max", baseline.loss_max)):
            registry.set(metrics.BASELINE_LOSS, value, stat)
        registry.set(metrics.BASELINE_STEP_SECONDS, baseline.step_seconds)
        registry.set(metrics.BASELINE_SAMPLES, baseline.samples_per_second)
        registry.set(metrics.BASELINE_GRADIENT_NORM, baseline.gradient_norm)
        registry.set(metrics.BASELINE_UTILIZATION, baseline.utilization)
