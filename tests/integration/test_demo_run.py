"""The demo as users run it: what it stores is what the run logged, and nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration.prometheus_server import wait_until

pytestmark = [pytest.mark.mindspore, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 200.0


class Demo:
    """A demo that runs; `mark` is in the environment of everything that it starts."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.mark = uuid.uuid4().hex
        self.output = directory / "demo.out"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "exporter"),
            "TMPDIR": str(directory),
            "DEMO_MARK": self.mark,
        }
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mindspore_exporter.cli", "demo", "--port", "21440", *words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def ends_with(self) -> int:
        """Its exit status."""
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {END_SECONDS:.0f} s:\n{self.said()}") from None

    def alive(self) -> bool:
        assert self.process.poll() is None, self.said()
        return True

    def phase_is_shown(self, phase: str) -> bool:
        return self.alive() and re.search(rf"^ *\d+ +{phase} ", self.said(), re.MULTILINE) is not None

    def processes(self) -> list[psutil.Process]:
        """What lives of it, itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("DEMO_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    started: list[Demo] = []
    yield started
    for demo in started:
        for process in demo.processes():
            process.kill()
        demo.process.wait()


@pytest.mark.prometheus
def test_what_prometheus_stored_is_what_the_run_logged(tmp_path: Path, demos: list[Demo]) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        demo = Demo(tmp_path, "--steps", "80", "--prometheus-port", str(busy.getsockname()[1]))
        demos.append(demo)
        assert demo.ends_with() == 0, demo.said()
    said = demo.said()
    assert "What Prometheus stored is what the run logged, on all ranks: 2." in said
    assert "with the shipped prometheus.yml; changed: scrape_interval 1s" in said
    for rank in "01":
        assert re.search(rf"^ +{rank}  step +80 +80   equal$", said, re.MULTILINE)
        assert re.search(
            rf"^ +{rank}  loss, each scrape +\d+ scrapes +\d+ steps   largest difference 0$", said, re.MULTILINE
        )
    assert demo.processes() == []
    assert list(tmp_path.iterdir()) == [demo.output], "the temporary directory was not removed"


def test_without_prometheus_a_run_of_seconds_ends_on_all_ranks_at_the_same_step(
    tmp_path: Path, demos: list[Demo]
) -> None:
    directory = tmp_path / "kept"
    demo = Demo(tmp_path, "--no-prometheus", "--seconds", "4", "--dir", str(directory))
    demos.append(demo)
    assert demo.ends_with() == 0, demo.said()
    assert "What the endpoints showed is what the run logged, on all ranks: 2." in demo.said()
    steps = [len((directory / "run" / f"rank{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert steps[0] == steps[1] > 1
    assert demo.processes() == []


@pytest.mark.prometheus
def test_ctrl_c_leaves_nothing_running(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path, "--steps", "100000", "--prometheus-port", "21090")
    demos.append(demo)
    wait_until(lambda: demo.phase_is_shown("training"), 120.0, "training of a rank")
    names = {process.name() for process in demo.processes()}
    assert len(demo.processes()) >= 6, f"the demo, msrun, its scheduler, two ranks, Prometheus; found {names}"
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(20) == 130
    assert demo.processes() == []
    assert "stopped; nothing is left running" in demo.said()
    assert list(tmp_path.iterdir()) == [demo.output], "the temporary directory was not removed"


@pytest.mark.prometheus
def test_a_failed_launcher_fails_the_demo_and_its_orphans_end(tmp_path: Path, demos: list[Demo]) -> None:
    demo = Demo(tmp_path, "--steps", "100000", "--prometheus-port", "21090")
    demos.append(demo)
    wait_until(lambda: demo.alive() and len(demo.processes()) >= 6, 60.0, "start of the ranks")
    (launcher,) = [process for process in demo.processes() if "mindspore.parallel.cluster.run" in process.cmdline()]
    launcher.terminate()  # msrun leaves its ranks behind
    assert demo.process.wait(30) == 1
    assert f"msrun ended with status {-signal.SIGTERM}" in demo.said()
    assert demo.processes() == []
