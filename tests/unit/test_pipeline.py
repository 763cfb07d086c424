"""Specification of `pipeline.py`: what the records make of the page, without MindSpore."""

from __future__ import annotations

import logging
import math

import pytest

from mindspore_exporter import metrics
from mindspore_exporter.config import load
from mindspore_exporter.pipeline import Pipeline
from mindspore_exporter.records import (
    CheckpointBegan,
    CheckpointEnded,
    CheckpointWhole,
    EvaluationBegan,
    EvaluationEnded,
    PhaseChanged,
    RunEnded,
)
from mindspore_exporter.state import RunState
from unit.steps import WALL, began, compile_began, pipeline, publish, step


def trained(steps: int, target: Pipeline | None = None) -> Pipeline:
    target = target or pipeline()
    target.handle(began())
    target.handle(compile_began())
    for number in range(1, steps + 1):
        target.handle(step(number, outputs=2.0 - number / 100, compiled=number == 1))
    publish(target)
    return target


def test_the_page_of_a_rank_that_has_not_begun_says_starting_and_no_values() -> None:
    target = pipeline()
    registry = target.registry
    assert registry.value(metrics.PHASE, "starting") == 1
    assert registry.value(metrics.WORLD_SIZE) == 2
    assert registry.value(metrics.STALL_TIMEOUT) == 180
    assert registry.value(metrics.STEP) is None
    assert registry.value(metrics.LOSS, "total") is None
    assert registry.value(metrics.ATTEMPT) is None


def test_steps_samples_and_loss_are_those_of_the_records() -> None:
    registry = trained(5).registry
    assert registry.value(metrics.STEP) == registry.value(metrics.STEPS) == 5
    assert registry.value(metrics.SAMPLES) == 20
    assert registry.value(metrics.LOSS, "total") == 1.95
    assert registry.value(metrics.LAST_STEP_TIMESTAMP) == WALL + 15
    assert registry.value(metrics.TOKENS) == 0


def test_the_compiling_step_is_not_a_step_time() -> None:
    registry = trained(5).registry
    assert registry.count(metrics.STEP_SECONDS) == 4
    assert registry.value(metrics.STEP_SECONDS) == pytest.approx(4.0)
    assert registry.value(metrics.COMPILE_SECONDS) == pytest.approx(9.0)
    assert registry.value(metrics.DATA_WAIT_SECONDS) == pytest.approx(1.0)


def test_a_sink_counts_its_steps_and_shows_no_data_wait() -> None:
    target = pipeline()
    target.handle(began(sink=True, steps_per_record=50))
    target.handle(compile_began())
    for number in (1, 2, 3):
        target.handle(
            step(
                50 * number,
                steps=50,
                samples=200.0,
                began_at=10.0 * number,
                ended_at=10.0 * number + 5,
                compiled=number == 1,
            )
        )
    publish(target)
    registry = target.registry
    assert registry.value(metrics.STEPS) == 150
    assert registry.value(metrics.STEPS_PER_RECORD) == 50
    assert registry.value(metrics.SAMPLES) == 600
    assert registry.count(metrics.STEP_SECONDS) == 100
    assert registry.value(metrics.STEP_SECONDS) == pytest.approx(20.0)
    assert "mindspore_train_data_wait_seconds" not in registry.render().decode()


def test_steps_that_the_full_queue_dropped_still_count() -> None:
    target = trained(5)
    target.handle(step(9))
    publish(target)
    assert target.registry.value(metrics.STEPS) == 9
    assert target.registry.value(metrics.SAMPLES) == 36


def test_a_nan_is_counted_once_a_step_and_shown() -> None:
    target = trained(3)
    target.handle(step(4, outputs=math.nan))
    publish(target)
    assert target.registry.value(metrics.NONFINITE, "loss") == 1
    shown = target.registry.value(metrics.LOSS, "total")
    assert shown is not None
    assert math.isnan(shown)
    assert math.isfinite(target.registry.value(metrics.LOSS_WINDOW, "mean") or math.nan)


def test_a_step_that_the_loss_scaler_skipped_is_an_overflow_and_not_non_finite() -> None:
    target = pipeline()
    target.handle(began(train_cell=("MFTrainOneStepCell",)))
    target.handle(step(1, outputs=(math.inf, True, 1024.0, 0.1, None)))
    target.handle(step(2, outputs=(2.0, False, 512.0, 0.1, 3.0)))
    publish(target)
    registry = target.registry
    assert registry.value(metrics.OVERFLOW_STEPS) == 1
    assert registry.value(metrics.NONFINITE, "loss") == 0
    assert registry.value(metrics.LOSS_SCALE) == 512
    assert registry.value(metrics.GRADIENT_NORM) == 3
    assert registry.value(metrics.LEARNING_RATE, "0") == pytest.approx(0.1)


def test_a_late_read_that_differs_is_an_error_and_not_a_value() -> None:
    failed = []
    target = pipeline(late_read_failed=lambda: failed.append(True))
    target.handle(began())
    target.handle(step(1, outputs=1.0, immediate=(1.0,)))
    target.handle(step(2, outputs=7.0, immediate=(2.0,)))
    publish(target)
    assert failed == [True]
    assert target.registry.value(metrics.ERRORS, "decode") == 1
    assert target.registry.value(metrics.LOSS, "total") == 1.0


def test_a_record_that_cannot_be_handled_is_counted_and_the_next_one_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    target = trained(2)
    with caplog.at_level(logging.ERROR):
        for number in (3, 4):
            target.handle(step(number, samples="many"))
    target.handle(step(5))
    publish(target)
    assert target.registry.value(metrics.ERRORS, "decode") == 2
    assert target.registry.value(metrics.STEP) == 5
    assert len(caplog.records) == 1


def test_a_checkpoint_is_timed_and_the_longest_is_kept() -> None:
    target = trained(3)
    for at, seconds in ((14.0, 5.0), (30.0, 2.0)):
        target.handle(CheckpointBegan(at, WALL + at, 3))
        publish(target)
        assert target.registry.value(metrics.PHASE, "checkpointing") == 1
        target.handle(CheckpointEnded(at + seconds, WALL + at + seconds, 3, failed=False))
    publish(target)
    registry = target.registry
    assert registry.value(metrics.PHASE, "training") == 1
    assert registry.value(metrics.CHECKPOINT_LAST_DURATION) == 2
    assert registry.value(metrics.CHECKPOINT_LONGEST) == 5
    assert registry.value(metrics.CHECKPOINT_LAST_TIMESTAMP) == WALL + 32
    assert (registry.count(metrics.CHECKPOINT_SECONDS), registry.value(metrics.CHECKPOINT_SECONDS)) == (2, 7)


def test_an_asynchronous_checkpoint_lasts_until_its_file_is_whole() -> None:
    target = trained(3)
    target.handle(CheckpointBegan(14.0, WALL + 14, 3))
    target.handle(CheckpointEnded(14.5, WALL + 14.5, 3, failed=False, file="x.ckpt"))
    publish(target)
    assert target.registry.value(metrics.PHASE, "training") == 1
    assert target.registry.value(metrics.CHECKPOINT_LAST_STEP) is None
    target.handle(CheckpointWhole(20.0, WALL + 20, 3, failed=False))
    assert target.registry.value(metrics.CHECKPOINT_LAST_DURATION) == 6


def test_a_failed_checkpoint_moves_nothing_but_the_count_of_failures() -> None:
    target = trained(3)
    target.handle(CheckpointBegan(14.0, WALL + 14, 3))
    target.handle(CheckpointEnded(15.0, WALL + 15, 3, failed=True))
    assert target.registry.value(metrics.CHECKPOINT_FAILURES) == 1
    assert target.registry.value(metrics.CHECKPOINT_LAST_TIMESTAMP) is None


def test_an_evaluation_shows_its_values_and_its_duration() -> None:
    target = trained(3)
    target.handle(EvaluationBegan(14.0, WALL + 14, 3))
    target.handle(EvaluationEnded(16.0, WALL + 16, 3, {"accuracy": 0.75}))
    publish(target)
    registry = target.registry
    assert registry.value(metrics.EVAL_VALUE, "accuracy") == 0.75
    assert registry.value(metrics.EVAL_LAST_STEP) == 3
    assert registry.value(metrics.EVAL_LAST_DURATION) == 2
    assert registry.value(metrics.ACTIVITY_SECONDS, "evaluation") == 2


def test_a_pause_is_a_phase_of_its_own() -> None:
    target = trained(3)
    target.handle(PhaseChanged(14.0, WALL, "paused"))
    publish(target)
    assert target.registry.value(metrics.PHASE, "paused") == 1
    target.handle(PhaseChanged(20.0, WALL, ""))
    publish(target)
    assert target.registry.value(metrics.PHASE, "training") == 1
    assert target.registry.value(metrics.ACTIVITY_SECONDS, "paused") == 6


@pytest.mark.parametrize(
    ("reason", "phase"),
    [("finished", "finished"), ("stop_requested", "finished"), ("sigterm", "failed"), ("out_of_memory", "failed")],
)
def test_the_end_has_a_reason_and_the_first_word_counts(reason: str, phase: str) -> None:
    target = trained(3)
    target.handle(RunEnded(14.0, WALL + 14, reason, reason))
    target.handle(RunEnded(15.0, WALL + 15, "exception", "exception"))
    publish(target)
    assert target.registry.value(metrics.END_TIMESTAMP, reason) == WALL + 14
    assert target.registry.value(metrics.END_TIMESTAMP, "exception") is None
    assert target.registry.value(metrics.PHASE, phase) == 1


def test_a_training_that_goes_on_takes_its_end_back() -> None:
    target = trained(3)
    target.handle(RunEnded(14.0, WALL + 14, "device_error", "device_error"))
    target.handle(began(first_step=3))
    target.handle(step(4))
    publish(target)
    assert target.registry.value(metrics.END_TIMESTAMP, "device_error") is None
    assert target.registry.value(metrics.PHASE, "training") == 1
    assert target.registry.value(metrics.STEPS) == 4


def test_a_restart_counts_on_and_knows_the_steps_that_it_repeats() -> None:
    target = pipeline()
    target.restore(RunState(attempt=3, highest_step=12, baseline=None))
    target.handle(began(first_step=10))
    for number in range(11, 16):
        target.handle(step(number))
    publish(target)
    assert target.registry.value(metrics.ATTEMPT) == 3
    assert target.registry.value(metrics.RESUMED_STEP) == 10
    assert target.registry.value(metrics.REPEATED_STEPS) == 2


def test_the_baseline_is_learnt_and_then_published() -> None:
    config = load(baseline={"from": "self", "steps": 30, "warmup_steps": 5})
    target = trained(25, pipeline(config))
    assert target.registry.value(metrics.BASELINE_LOSS, "mean") is None
    for number in range(26, 60):
        target.handle(step(number, outputs=2.0 - number / 100))
    publish(target)
    assert target.registry.value(metrics.BASELINE_STEP_SECONDS) == pytest.approx(1.0)
    assert target.registry.value(metrics.BASELINE_SAMPLES) == pytest.approx(4.0)
    assert target.registry.value(metrics.BASELINE_LOSS, "mean") is not None


def test_thresholds_of_the_run_are_exported_by_rank_0_only() -> None:
    config = load(thresholds={"plateau_steps": 500})
    assert pipeline(config).registry.value(metrics.THRESHOLD, "plateau_steps") == 500


def test_the_stall_timeout_follows_the_usual_time_between_records() -> None:
    config = load(stall={"floor_seconds": 3, "factor": 10})
    assert trained(30, pipeline(config)).registry.value(metrics.STALL_TIMEOUT) == pytest.approx(10.0)
