"""Whatever breaks in the exporter, the training's result is the same, bit by bit."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.train import Model

from integration.tiny import AtEachStep, dataset, model, monitor, network
from mindspore_exporter import PrometheusMonitor

pytestmark = pytest.mark.mindspore

ROOT = Path(__file__).resolve().parent.parent.parent


def weights_after(*callbacks: Any) -> list[Any]:
    trained = model()
    trained.train(3, dataset(), callbacks=list(callbacks))
    return [parameter.asnumpy().copy() for parameter in trained.train_network.get_parameters()]


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    """Weights and optimiser state of the run without an exporter."""
    return weights_after()


@contextmanager
def a_busy_port(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        watch = monitor(port=busy.getsockname()[1], port_probe="off")
        yield watch
        assert watch.exporter.port is None


@contextmanager
def a_read_only_state_directory(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    watch = monitor(state_dir="/proc/state", discovery={"directory": "/proc"})
    yield watch
    assert watch.exporter._files.errors >= 2


@contextmanager
def a_hung_state_directory(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    os.mkfifo(tmp_path / "tiny-rank0.json")  # opening it waits for a writer that never comes
    watch = monitor(state_dir=tmp_path)
    yield watch
    assert watch.exporter._files._running is not None
    os.close(os.open(tmp_path / "tiny-rank0.json", os.O_WRONLY | os.O_NONBLOCK))


@contextmanager
def a_full_disk(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        watch = monitor(state_dir=tmp_path / "state", discovery={"directory": tmp_path})
        yield watch
        assert watch.exporter._files.errors >= 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def an_exception_in_the_worker(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    watch = monitor()
    start = watch.exporter.start

    def start_broken() -> Any:
        started = start()
        started.pipeline._handlers = {}
        started.pipeline.publish = None  # type: ignore[method-assign, assignment]
        return started

    watch.exporter.start = start_broken  # type: ignore[method-assign]
    yield watch
    assert watch.exporter.pipeline.errors["decode"] > 20


@contextmanager
def an_exception_in_each_hook(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    watch = monitor()
    watch.exporter.queue.put_step = None  # type: ignore[method-assign, assignment]
    watch.exporter.queue.put = None  # type: ignore[method-assign, assignment]
    yield watch
    assert watch.exporter.hook_errors > 0


@contextmanager
def a_removed_configuration(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    path = tmp_path / "monitor.yaml"
    path.write_text("port: 0\nlisten: 127.0.0.1\nrun: tiny\nsignals: false\n")
    watch = PrometheusMonitor(path)
    path.unlink()
    yield watch


@contextmanager
def a_client_that_never_reads(tmp_path: Path) -> Iterator[PrometheusMonitor]:
    watch = monitor()
    watch.exporter.start()
    clients = [socket.create_connection(("127.0.0.1", watch.exporter.port or 0)) for _ in range(40)]
    for client in clients:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
    yield watch
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "fault",
    [
        a_busy_port,
        a_read_only_state_directory,
        a_hung_state_directory,
        a_full_disk,
        an_exception_in_the_worker,
        an_exception_in_each_hook,
        a_removed_configuration,
        a_client_that_never_reads,
    ],
)
def test_the_result_is_that_of_a_run_without_the_exporter(
    fault: Callable[[Path], Any], tmp_path: Path, undisturbed: list[Any]
) -> None:
    with fault(tmp_path) as watch:
        disturbed = weights_after(watch)
        for ours, theirs in zip(disturbed, undisturbed, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        watch.exporter.stop()


class HugeOutputs(nn.Cell):
    """A train cell that returns a loss and a gibibyte."""

    def __init__(self, net: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)

    def construct(self, x: Any, y: Any) -> Any:
        loss = self.step(x, y)
        return loss, ops.fill(ms.float32, (256, 1024, 1024), 1.0)


def test_outputs_of_a_gibibyte_are_not_held() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    net, watch, held = network(), monitor(), []

    def look(params: Any) -> None:
        held.extend(record.outputs for record in list(watch.exporter.queue._records) if hasattr(record, "outputs"))

    Model(HugeOutputs(net, nn.Momentum(net.trainable_params(), 0.01, 0.9))).train(
        1, dataset(), callbacks=[watch, AtEachStep(look)]
    )
    assert watch.exporter.worker.flush(10)
    assert held
    assert all(getattr(value, "size", 1) == 1 or not hasattr(value, "asnumpy") for output in held for value in output)
    assert watch.exporter.pipeline.step == 8
    watch.exporter.stop()


@pytest.mark.parametrize("callbacks", ["[]", "[PrometheusMonitor(port=0, listen='127.0.0.1')]"])
def test_an_exception_ends_the_process_with_the_same_status_and_traceback(callbacks: str, tmp_path: Path) -> None:
    body = f"""
        from integration.tiny import *
        class Fails(Callback):
            def on_train_step_end(self, run_context):
                raise RuntimeError("boom at step 1")
        model().train(1, dataset(), callbacks=[*{callbacks}, Fails()])
    """
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT / 'tests'}",
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: boom at step 1")
