"""SIGTERM and Ctrl-C in real MindSpore trainings: blocked in a collective, in a compile, and sent by MindSpore itself."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.mindspore

TRAINING = textwrap.dedent(
    """
    import os, signal, time
    import numpy as np
    import mindspore as ms
    import mindspore.dataset as ds
    from mindspore import Callback, Model, nn
    from mindspore_exporter.reasons import classify
    from mindspore_exporter.signals import SignalWatch

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    LAYERS = int(os.environ.get("LAYERS", "1"))
    SLEEPER = os.environ.get("SLEEPER") == os.environ.get("RANK_ID", "0")

    def say(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    ms.set_context(mode=ms.PYNATIVE_MODE if os.environ.get("PYNATIVE") else ms.GRAPH_MODE)
    if "MS_ROLE" in os.environ:
        from mindspore.communication import init
        init()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=2)

    class Says(Callback):
        step = 0
        def on_train_step_begin(self, run_context):
            self.step += 1
            say("begin", self.step)
        def on_train_step_end(self, run_context):
            say("end", self.step)
            if SLEEPER and self.step == 2:
                say("sleeps")
                time.sleep(300)

    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.first, self.second, self.norm = nn.Dense(16, 32), nn.Dense(32, 16), nn.LayerNorm((16,))
        def construct(self, x):
            x = x + self.attention(x, x, x)[0]
            return self.norm(x + self.second(ms.ops.relu(self.first(x))))

    def batches():
        for _ in range(500):
            yield np.ones((2, 4, 16), np.float32), np.ones((2, 4, 16), np.float32)

    watch = SignalWatch(lambda signum: say("ended", signum, watch.reason()))
    if os.environ.get("WATCH") == "1":
        say("watched", watch.install())
    network = nn.SequentialCell(*[Block() for _ in range(LAYERS)])
    model = Model(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.01))
    try:
        model.train(1000, ds.GeneratorDataset(batches, ["data", "label"]), [Says()], dataset_sink_mode=False)
    except BaseException as error:
        say("raised", classify(type(error), error))
        raise
    """
)


class Training:
    """A process that trains; its lines are read with a deadline."""

    def __init__(self, script: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "GLOG_v": "3", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd=script.parent,
        )
        assert self.process.stdout is not None
        self.descriptor = self.process.stdout.fileno()
        self.buffer = b""

    def wait_for(self, wanted: str, limit: float = 90.0) -> str:
        """The first line that begins with `wanted`; lines before it are skipped."""
        deadline = time.monotonic() + limit
        skipped: list[str] = []
        while True:
            while b"\n" not in self.buffer:
                ready, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
                chunk = os.read(self.descriptor, 4096) if ready else b""
                assert chunk, f"no line {wanted!r}, but {skipped[-10:]}; exit code {self.process.poll()}"
                self.buffer += chunk
            line, _, self.buffer = self.buffer.partition(b"\n")
            if line.decode(errors="replace").startswith(wanted):
                return line.decode()
            skipped.append(line.decode(errors="replace"))

    def send(self, signum: int) -> float:
        """Send the signal; returns when, in `time.monotonic()` seconds."""
        self.process.send_signal(signum)
        return time.monotonic()

    def status(self, limit: float = 60.0) -> int:
        """The exit code, or minus the signal that killed the process."""
        return self.process.wait(limit)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


Start = Callable[..., Training]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    trainings: list[Training] = []
    script = tmp_path / "training.py"  # a file: MindSpore reads the source of `construct`
    script.write_text(TRAINING)

    def run(**environment: str) -> Training:
        trainings.append(Training(script, **environment))
        return trainings[-1]

    yield run
    for training in trainings:
        training.kill()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_two_ranks(start: Start, **environment: str) -> tuple[Training, Training, Training]:
    """Scheduler and two ranks with what `msrun` would set; rank 1 stops taking part after its second step."""
    common = {
        "MS_WORKER_NUM": "2",
        "MS_SCHED_HOST": "127.0.0.1",
        "MS_SCHED_PORT": free_port(),
        "RANK_SIZE": "2",
        "SLEEPER": "1",
        "WATCH": "1",
        **environment,
    }
    scheduler = start(**common, MS_ROLE="MS_SCHED")
    ranks = [start(**common, MS_ROLE="MS_WORKER", MS_NODE_ID=rank, RANK_ID=rank, DEVICE_ID=rank) for rank in "01"]
    ranks[1].wait_for("sleeps")
    ranks[0].wait_for("begin 3")
    return scheduler, ranks[0], ranks[1]


def test_sigterm_ends_a_rank_that_is_blocked_in_an_all_reduce_within_7_seconds(start: Start) -> None:
    _, blocked, _ = start_two_ranks(start)
    sent = blocked.send(signal.SIGTERM)
    assert blocked.wait_for("ended", 7.0) == "ended 15 sigterm"
    assert blocked.status(7.0) == -signal.SIGTERM
    assert time.monotonic() - sent < 7.0


def test_a_rank_that_mindspore_ends_because_its_scheduler_is_gone_is_self_terminated(start: Start) -> None:
    scheduler, blocked, sleeping = start_two_ranks(start, MS_HEARTBEAT_RETRY_TIMEOUT="2")
    blocked.kill()
    scheduler.kill()
    assert sleeping.wait_for("ended") == "ended 15 self_terminated"
    assert sleeping.status() == -signal.SIGTERM


def test_sigterm_during_a_compile_ends_the_process_at_most_10_seconds_later_than_without_the_watch(
    start: Start,
) -> None:
    seconds = {}
    for watch in ("0", "1"):
        training = start(LAYERS="12", WATCH=watch)
        training.wait_for("begin 1")
        time.sleep(1.0)  # into the compile, which takes several seconds
        sent = training.send(signal.SIGTERM)
        assert training.status() == -signal.SIGTERM
        seconds[watch] = time.monotonic() - sent
        with pytest.raises(AssertionError, match="no line 'end 1'"):
            training.wait_for("end 1", 0.0)
    assert seconds["1"] <= seconds["0"] + 10.0


@pytest.mark.parametrize("mode", [{}, {"PYNATIVE": "1"}], ids=["graph", "pynative"])
def test_ctrl_c_after_the_first_step_is_a_keyboard_interrupt_with_mindspores_own_wait_status(
    start: Start, mode: dict[str, str]
) -> None:
    watched, plain = start(WATCH="1", **mode), start(WATCH="0", **mode)
    for training in (watched, plain):
        training.wait_for("end 3")
        training.send(signal.SIGINT)
    assert watched.wait_for("ended") == "ended 15 keyboard_interrupt"
    assert (watched.status(), plain.status()) == (-signal.SIGTERM, -signal.SIGTERM)


def test_ctrl_c_before_the_first_step_raises_keyboard_interrupt(start: Start) -> None:
    training = start(WATCH="1", LAYERS="12")
    training.wait_for("begin 1")
    training.send(signal.SIGINT)
    assert training.wait_for("raised") == "raised keyboard_interrupt"
    assert training.status() in (-signal.SIGINT, 130, 1)
