"""Sink mode, played: the CPU ignores sinks silently, so Ascend's call pattern goes through the hooks by hand.

On Ascend `Model._train_dataset_sink_process` calls step_begin and step_end once a sink; cur_step_num grows by the sink's
size, batch_num is the sink's size, net_outputs are the last step's, train_dataset_element is None.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.train.callback import RunContext
from mindspore.train.callback._callback import InternalCallbackParam

from integration.tiny import Page, dataset, monitor, network
from mindspore_exporter import PrometheusMonitor

pytestmark = pytest.mark.mindspore


def sink_params(watch: PrometheusMonitor, sink: int, epochs: int) -> Any:
    net = network()
    cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.01, 0.9))
    params = InternalCallbackParam()
    params.update(
        cur_step_num=0,
        train_network=cell,
        network=net,
        optimizer=cell.optimizer,
        epoch_num=epochs,
        batch_num=sink,
        mode="train",
        train_dataset=dataset(),
        train_dataset_element=None,
        list_callback=[watch],
        dataset_sink_mode=True,
        initial_step=None,
        device_number=1,
        parallel_mode="stand_alone",
    )
    return params


def play(watch: PrometheusMonitor, params: Any, sinks: int, seconds: float = 0.0) -> None:
    context = RunContext(params)
    with watch:
        watch.on_train_begin(context)
        for number in range(sinks):
            params.cur_epoch_num = number + 1
            watch.on_train_epoch_begin(context)
            watch.on_train_step_begin(context)
            time.sleep(seconds)
            params.cur_step_num += params.batch_num
            params.net_outputs = Tensor(np.float32(1.0 / (number + 1)))
            watch.on_train_step_end(context)
            watch.on_train_epoch_end(context)
        watch.on_train_end(context)


@pytest.mark.parametrize("sink", [1, 7, 100])
def test_a_sink_counts_its_steps_samples_and_epochs(sink: int) -> None:
    watch = monitor()
    play(watch, sink_params(watch, sink, epochs=5), sinks=5)
    page = Page(watch.exporter)
    assert page["mindspore_train_steps_per_record"] == sink
    assert page["mindspore_train_steps_total"] == page["mindspore_train_step"] == 5 * sink
    assert page["mindspore_train_steps_planned"] == 5 * sink
    assert page["mindspore_train_samples_total"] == 5 * sink * 4
    assert page["mindspore_train_step_seconds_count"] == 4 * sink  # the first sink compiles
    assert page["mindspore_train_loss", "total"] == pytest.approx(0.2)
    assert page["mindspore_train_epoch"] == 5
    assert "mindspore_train_data_wait_seconds" not in page.text
    assert (page.phase, page.end_reason) == ("finished", "finished")


def test_a_sinks_time_is_shared_by_its_steps() -> None:
    watch = monitor()
    play(watch, sink_params(watch, 10, epochs=4), sinks=4, seconds=0.1)
    page = Page(watch.exporter)
    total, count = page["mindspore_train_step_seconds_sum"], page["mindspore_train_step_seconds_count"]
    assert total is not None
    assert count == 30
    assert 0.3 <= total < 3.0
    assert (page["mindspore_train_activity_seconds_total", "step"] or 0) >= 0.3
