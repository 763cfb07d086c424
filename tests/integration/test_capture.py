"""`PrometheusMonitor` on real `Model.train` runs: the page's numbers are the run's own numbers."""

from __future__ import annotations

import math
import threading
import urllib.request
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.train import CheckpointConfig, LearningRateScheduler, LossMonitor, Model, ModelCheckpoint
from mindspore.train.callback import Callback
from prometheus_client.parser import text_string_to_metric_families

from integration.tiny import AtEachStep, Page, dataset, model, monitor, network
from mindspore_exporter import metrics

pytestmark = pytest.mark.mindspore

MODES = pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE], ids=["graph", "pynative"])


@MODES
def test_every_step_shows_the_loss_rate_step_and_samples_of_the_run(mode: int) -> None:
    watch, seen = monitor(), []

    def compare(params: Any) -> None:
        page = Page(watch.exporter)
        own = float(params.net_outputs.asnumpy())
        assert page["mindspore_train_loss", "total"] == own
        assert page["mindspore_train_step"] == page["mindspore_train_steps_total"] == params.cur_step_num
        assert page["mindspore_train_samples_total"] == 4 * params.cur_step_num
        assert page["mindspore_train_epoch"] == params.cur_epoch_num
        assert page["mindspore_train_learning_rate", "0"] == pytest.approx(0.01, rel=1e-7)
        assert page["mindspore_train_loss_valid"] == 1
        assert page["mindspore_train_network_training"] == 1
        assert page.phase == "training"
        seen.append(own)

    model(mode=mode).train(3, dataset(), callbacks=[watch, AtEachStep(compare)])
    page = Page(watch.exporter)
    assert len(seen) == 24
    assert (page.phase, page.end_reason) == ("finished", "finished")
    assert page["mindspore_train_steps_planned"] == 24
    assert page["mindspore_train_loss_window", "mean"] == pytest.approx(np.mean(seen), rel=1e-6)
    assert page["mindspore_train_loss_window", "min"] == min(seen)
    assert watch.exporter.hook_errors == 0
    assert sum(watch.exporter.pipeline.errors.values()) == 0
    watch.exporter.stop()


def test_a_schedule_shows_the_rate_of_the_step_just_done() -> None:
    schedule = nn.CosineDecayLR(0.001, 0.1, 24)
    trained, watch, rates = model(schedule), monitor(), []
    before = AtEachStep(lambda params: None)
    before.on_train_step_begin = lambda context: rates.append(  # type: ignore[method-assign]
        float(context.original_args().optimizer.get_lr().asnumpy())
    )

    def compare(params: Any) -> None:
        assert Page(watch.exporter)["mindspore_train_learning_rate", "0"] == pytest.approx(rates[-1], rel=1e-6)

    trained.train(3, dataset(), callbacks=[before, watch, AtEachStep(compare)])
    assert len(rates) == 24
    assert rates[0] != rates[-1]
    watch.exporter.stop()


@pytest.mark.parametrize("position", ["before", "after"])
def test_a_rate_that_a_callback_assigns_is_that_of_the_step_just_done(position: str) -> None:
    scheduler = LearningRateScheduler(lambda rate, step: 0.02 / (step + 1))
    watch, expected = monitor(), [0.02]

    def compare(params: Any) -> None:
        step = params.cur_step_num
        assert Page(watch.exporter)["mindspore_train_learning_rate", "0"] == pytest.approx(expected[-1], rel=1e-6)
        expected.append(0.02 / (step + 1))

    order = [scheduler, watch] if position == "after" else [watch, scheduler]
    model(0.02).train(2, dataset(), callbacks=[*order, AtEachStep(compare)])
    assert len(expected) == 17
    watch.exporter.stop()


@pytest.mark.parametrize("order", ["monitor first", "monitor last"])
def test_a_nan_step_is_counted_when_another_callback_raises_on_it(order: str) -> None:
    watch = monitor()
    others = [watch, LossMonitor()] if order == "monitor first" else [LossMonitor(), watch]
    with pytest.raises(ValueError, match=r"(?i)nan|inf"):
        model().train(1, dataset(poison=17), callbacks=others)
    page = Page(watch.exporter)
    assert page["mindspore_train_nonfinite_total", "loss"] == 1
    assert page["mindspore_train_step"] == 5
    assert (page.phase, page.end_reason) == ("failed", "non_finite")
    loss = page["mindspore_train_loss", "total"]
    assert loss is not None
    assert math.isnan(loss)
    watch.exporter.stop()


def test_a_nan_that_nobody_stops_is_counted_at_each_step_and_never_hidden() -> None:
    watch = monitor()
    model().train(1, dataset(poison=17), callbacks=[watch])
    page = Page(watch.exporter)
    assert page["mindspore_train_nonfinite_total", "loss"] == 4  # steps 5 to 8: the weights are NaN from 5 on
    assert page.end_reason == "finished"
    watch.exporter.stop()


def test_a_failing_step_itself_is_not_counted_as_done() -> None:
    class Fails(Callback):
        def on_train_step_begin(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == 4:
                raise RuntimeError("boom")

    watch = monitor()
    with pytest.raises(RuntimeError, match="boom"):
        model().train(1, dataset(), callbacks=[watch, Fails()])
    page = Page(watch.exporter)
    assert page["mindspore_train_steps_total"] == 3
    assert (page.phase, page.end_reason) == ("failed", "exception")
    watch.exporter.stop()


def test_fit_evaluates_without_ending_and_its_values_are_shown() -> None:
    watch = monitor()
    phases: list[str] = []

    class Spy(Callback):
        def on_eval_step_end(self, run_context: Any) -> None:
            phases.append(Page(watch.exporter).phase)

    trained = model(metrics={"mae"})
    trained.fit(2, dataset(), dataset(16), callbacks=[watch, Spy()])
    page = Page(watch.exporter)
    assert set(phases) == {"evaluating"}
    assert page["mindspore_train_steps_total"] == 16
    assert page["mindspore_eval_last_step"] == 16
    mae = page["mindspore_eval_value", "mae"]
    assert mae is not None
    assert mae > 0
    assert (page["mindspore_eval_last_duration_seconds"] or 0) > 0
    assert (page["mindspore_train_activity_seconds_total", "evaluation"] or 0) > 0
    assert (page.phase, page.end_reason) == ("finished", "finished")
    watch.exporter.stop()


def test_several_train_calls_go_on_counting_and_compile_once() -> None:
    watch, trained = monitor(), model()
    trained.train(1, dataset(), callbacks=[watch])
    compile_seconds = Page(watch.exporter)["mindspore_train_compile_seconds"]
    trained.train(2, dataset(), callbacks=[watch])
    page = Page(watch.exporter)
    assert page["mindspore_train_steps_total"] == 24
    assert page["mindspore_train_step"] == 24  # the optimiser's own step goes on
    assert page["mindspore_train_resumed_step"] == 8
    assert page["mindspore_train_steps_planned"] == 24
    assert page["mindspore_train_compile_seconds"] == compile_seconds
    assert page.end_reason == "finished"
    watch.exporter.stop()


def test_a_second_monitor_of_the_same_settings_goes_on_with_the_endpoint_of_the_first() -> None:
    first, second, trained = monitor(), monitor(), model()
    trained.train(1, dataset(), callbacks=[first])
    port = first.exporter.port
    trained.train(1, dataset(), callbacks=[second])
    assert second.exporter.port == port
    assert Page(second.exporter)["mindspore_train_steps_total"] == 16
    second.exporter.stop()


def test_a_requested_stop_is_an_end_without_failure() -> None:
    class Stops(Callback):
        def on_train_step_end(self, run_context: Any) -> None:
            if run_context.original_args().cur_step_num == 3:
                run_context.request_stop()

    watch = monitor()
    model().train(1, dataset(), callbacks=[watch, Stops()])
    page = Page(watch.exporter)
    assert (page.phase, page.end_reason, page["mindspore_train_steps_total"]) == ("finished", "stop_requested", 3)
    watch.exporter.stop()


def test_a_resumed_run_knows_its_global_step() -> None:
    trained, watch = model(), monitor()
    trained.train(1, dataset())  # eight steps without the monitor: the optimiser's step is 8
    trained.train(3, dataset(), callbacks=[watch], initial_epoch=1)
    page = Page(watch.exporter)
    assert page["mindspore_train_resumed_step"] == 8
    assert page["mindspore_train_step"] == 24
    assert page["mindspore_train_steps_total"] == 16
    assert page["mindspore_train_epoch"] == 3
    assert page["mindspore_train_steps_planned"] == 24
    watch.exporter.stop()


@pytest.mark.parametrize("asynchronous", [False, "thread", "process"])
def test_checkpoints_are_timed_and_are_a_phase_of_their_own(tmp_path: Path, asynchronous: Any) -> None:
    config = CheckpointConfig(save_checkpoint_steps=4, async_save=asynchronous)
    saver, watch = ModelCheckpoint("tiny", str(tmp_path), config), monitor()
    model().train(1, dataset(), callbacks=[watch, saver])
    wait_for(lambda: Page(watch.exporter)["mindspore_checkpoint_seconds_count"] == 2)
    page = Page(watch.exporter)
    assert page["mindspore_checkpoint_last_step"] == 8
    assert page["mindspore_checkpoint_failures_total"] == 0
    newest = max(path.stat().st_mtime for path in tmp_path.glob("*.ckpt"))
    assert page["mindspore_checkpoint_last_timestamp_seconds"] == pytest.approx(newest, abs=1.0)
    assert (page["mindspore_train_activity_seconds_total", "checkpoint"] or 0) > 0
    # Two of seven intervals hold a checkpoint (the second save ends the run: no interval follows it).
    assert page["mindspore_train_step_seconds_count"] == 6
    assert "_save_ckpt" not in vars(saver)
    watch.exporter.stop()


def test_a_failed_checkpoint_is_counted_and_names_the_end(tmp_path: Path) -> None:
    target = tmp_path / "gone"
    saver = ModelCheckpoint("tiny", str(target), CheckpointConfig(save_checkpoint_steps=2))
    watch = monitor()

    def remove(params: Any) -> None:
        if params.cur_step_num == 1:
            for file in target.iterdir():
                file.unlink()
            target.rmdir()

    with pytest.raises((OSError, RuntimeError, ValueError)):
        model().train(1, dataset(), callbacks=[watch, saver, AtEachStep(remove)])
    page = Page(watch.exporter)
    assert page["mindspore_checkpoint_failures_total"] == 1
    assert page["mindspore_checkpoint_last_step"] is None
    assert page.phase == "failed"
    watch.exporter.stop()


def test_an_incomplete_last_batch_counts_its_own_samples() -> None:
    watch = monitor()
    model().train(2, dataset(rows=10, batch=4, drop_remainder=False), callbacks=[watch])
    assert Page(watch.exporter)["mindspore_train_samples_total"] == 20
    watch.exporter.stop()


class SeveralLosses(nn.Cell):
    """A train cell as detectors have it: (loss, loss_cls, loss_bbox, loss_giou)."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)

    def construct(self, x: Any, y: Any) -> Any:
        loss = self.step(x, y)
        return loss, loss * 0.5, loss * 0.25, ops.ones((), ms.float32)


def test_a_detectors_tuple_of_losses_is_not_read_as_overflow_scale_and_rate() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    net = network()
    cell = SeveralLosses(net, nn.Momentum(net.trainable_params(), 0.01, 0.9))
    watch = monitor(loss={"names": ["loss", "cls", "bbox", "giou"]})
    Model(cell).train(1, dataset(), callbacks=[watch])
    page = Page(watch.exporter)
    total = page["mindspore_train_loss", "total"]
    assert total is not None
    assert page["mindspore_train_loss", "cls"] == total * 0.5
    assert page["mindspore_train_loss", "bbox"] == total * 0.25
    assert page["mindspore_train_loss", "giou"] == 1
    assert page["mindspore_train_loss_scale"] is None
    assert page["mindspore_train_overflow_steps_total"] == 0
    watch.exporter.stop()


def test_the_exporter_evaluates_by_itself_where_it_is_asked_to() -> None:
    watch = monitor(evaluation={"every_steps": 4, "dataset": dataset(16), "max_batches": 2})
    model().train(1, dataset(), callbacks=[watch])
    page = Page(watch.exporter)
    assert page["mindspore_eval_last_step"] == 8
    loss = page["mindspore_eval_value", "loss"]
    assert loss is not None
    assert loss > 0
    assert page["mindspore_train_step_seconds_count"] == 6  # the interval that holds the evaluation of step 4 is none
    watch.exporter.stop()


@MODES
def test_the_training_thread_converts_no_tensor_beyond_the_twenty_proven_reads(
    mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[tuple[bool, int]] = []
    trainer = threading.get_ident()

    def counting(name: str) -> Any:
        convert = getattr(ms.Tensor, name)

        def counted(tensor: Any, *args: Any) -> Any:
            converted.append((threading.get_ident() == trainer, watch.exporter.pipeline.step))
            return convert(tensor, *args)

        return counted

    watch = monitor()
    trained = model(nn.CosineDecayLR(0.001, 0.1, 80), mode=mode)
    trained.train(1, dataset(), callbacks=[AtEachStep(lambda params: None)])
    watch.exporter.start()
    for name in ("asnumpy", "item", "__float__"):
        monkeypatch.setattr(ms.Tensor, name, counting(name))
    trained.train(10, dataset(), callbacks=[watch])
    assert watch.exporter.worker.flush(10)
    on_the_training_thread = sum(here for here, _ in converted)
    # One more for the optimiser's step at the begin, when no step is under way.
    assert 0 < on_the_training_thread <= 21
    assert len(converted) - on_the_training_thread >= 80
    assert watch.exporter.read_mode == "auto"


def test_the_budget_of_170_series_and_60_in_lean_holds_on_a_real_page() -> None:
    watch = monitor(
        loss={"names": ["a", "b", "c", "d"]},
        thresholds=dict.fromkeys(
            ("gradient_norm", "sample_seconds", "plateau_steps", "overflow_ratio", "goodput_ratio", "update_ratio"), 1.0
        ),
    )
    trained = model(metrics={"mae", "mse"})
    trained.fit(1, dataset(), dataset(16), callbacks=[watch])
    exporter = watch.exporter
    for name in ("a", "b", "c", "d"):
        exporter.registry.set(metrics.LOSS, 1.0, name)
    exporter.registry.set(metrics.LEARNING_RATE, 1.0, "1")
    exporter.registry.activate("device", "allocator")
    fill_one_device(exporter.registry)
    Page(exporter)
    assert exporter.registry.series() <= 170
    assert exporter.registry.series("lean") <= 60
    exporter.stop()


def test_a_live_scrape_has_only_families_of_the_catalogue_with_their_types_and_labels() -> None:
    watch = monitor()
    model(metrics={"mae"}).fit(1, dataset(), dataset(16), callbacks=[watch])
    assert watch.exporter.worker.flush(10)
    with urllib.request.urlopen(f"http://127.0.0.1:{watch.exporter.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    declared = {family["name"]: family for family in metrics.reference()}
    families = list(text_string_to_metric_families(text))
    assert len(families) > 40
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = {"info": "gauge", "stateset": "gauge"}.get(str(declared[name]["type"]), declared[name]["type"])
        assert family.type == kind, name
        assert family.documentation == declared[name]["help"]
        for sample in family.samples:
            labels = set(sample.labels) - {"run", "rank", "le"}
            assert labels == set(declared[name]["labels"]), sample.name  # type: ignore[call-overload]


def fill_one_device(registry: Any) -> None:
    """Every device and allocator family that one device can have, as the collectors of later work will."""
    for family in metrics.CATALOGUE.values():
        if family.group not in ("device", "allocator") or family.kind == "counter":
            continue
        if family.kind == "stateset":
            registry.state(family, family.values[0])
        elif family.kind == "info":
            registry.info(family, {})
        else:
            values = {
                "sensor": ("core", "memory"),
                "engine": ("core", "memory"),
                "domain": ("core",),
                "kind": ("hccs",),
                "code": (),
                "reason": family.values,
            }
            for value in [(v,) for v in values[family.labels[0]]] if family.labels else [()]:
                registry.set(family, 1.0, *value)


def wait_for(condition: Any, limit: float = 20.0) -> None:
    """Wait until the condition holds, at most `limit` seconds."""
    import time

    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.05)
