"""Specification of `exporter.py` by a hand-written loop: real endpoint, worker, files; no MindSpore."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mindspore_exporter import TrainingExporter, exporter
from mindspore_exporter.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def no_exporter_stays() -> Iterator[None]:
    yield
    left = exporter.active()
    if left is not None:
        left.stop()


def make(**settings: Any) -> TrainingExporter:
    return TrainingExporter(None, **{"port": 0, "listen": "127.0.0.1", "run": "loop", "signals": False, **settings})


def page(running: TrainingExporter) -> dict[tuple[str, ...], float]:
    """The page as a scrape over HTTP sees it, after all that was recorded is on it."""
    assert running.worker.flush(10.0)
    running._server.invalidate()
    with urllib.request.urlopen(f"http://127.0.0.1:{running.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (s.name, *(v for k, v in sorted(s.labels.items()) if k not in ("run", "rank"))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def phase(samples: dict[tuple[str, ...], float]) -> str:
    (name,) = [key[1] for key, value in samples.items() if key[0] == "mindspore_train_phase" and value == 1]
    return name


def wait_for(condition: Callable[[], object], limit: float = 10.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def wait_for_attempt(running: TrainingExporter) -> None:
    wait_for(lambda: ("mindspore_train_attempt",) in page(running))


def test_a_loop_of_ones_own_is_exported_step_by_step() -> None:
    with make() as running:
        running.begin(planned_steps=100, resumed_step=10)
        for number in range(5):
            with running.step(samples=32, tokens=320) as step:
                step.record(loss=2.0 - number, learning_rate=[0.1, 0.2], gradient_norm=1.5, components={"aux": 0.25})
        samples = page(running)
        assert samples["mindspore_train_loss", "total"] == -2.0
        assert samples["mindspore_train_loss", "aux"] == 0.25
        assert samples["mindspore_train_learning_rate", "1"] == 0.2
        assert samples["mindspore_train_gradient_norm",] == 1.5
        assert samples["mindspore_train_step",] == 15
        assert samples["mindspore_train_steps_planned",] == 100
        assert samples["mindspore_train_samples_total",] == 160
        assert samples["mindspore_train_tokens_total",] == 1600
        assert phase(samples) == "training"
    samples = page(running)
    assert phase(samples) == "finished"
    assert [key[1] for key in samples if key[0] == "mindspore_train_end_timestamp_seconds"] == ["finished"]


def test_an_exception_in_the_loop_is_told_and_goes_through() -> None:
    running = make()

    def train() -> None:
        with running:
            with running.step():
                pass
            raise MemoryError("boom")

    with pytest.raises(MemoryError, match="boom"):
        train()
    samples = page(running)
    assert phase(samples) == "failed"
    assert ("mindspore_train_end_timestamp_seconds", "out_of_memory") in samples


def test_scopes_of_a_loop_are_phases_of_their_own() -> None:
    with make() as running:
        with running.phase("loading"):
            assert phase(page(running)) == "loading"
        with running.step():
            pass
        with running.checkpoint():
            assert phase(page(running)) == "checkpointing"
        with running.evaluation() as values:
            assert phase(page(running)) == "evaluating"
            values["accuracy"] = 0.5
        with pytest.raises(OSError, match="disk"), running.checkpoint():
            raise OSError("disk")
        samples = page(running)
        assert phase(samples) == "training"
        assert samples["mindspore_checkpoint_seconds_count",] == 1
        assert samples["mindspore_checkpoint_failures_total",] == 1
        assert samples["mindspore_eval_value", "accuracy"] == 0.5
        with (
            pytest.raises(ValueError, match="'sleeping' cannot be set; allowed: loading, paused"),
            running.phase("sleeping"),
        ):
            pass


def test_nothing_is_left_after_a_hundred_starts_and_stops() -> None:
    make().start().stop()
    descriptors, before = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(100):
        running = make().start()
        with running.step() as step:
            step.record(loss=1.0)
        running.stop()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert set(threading.enumerate()) <= before


def test_a_busy_port_is_probed_past_and_the_real_one_is_known(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        running = make(port=port, port_probe="on").start()
        assert running.port is not None
        assert port < running.port <= port + exporter.PORTS_PROBED
        assert page(running)


def test_without_probing_a_busy_port_is_told_loudly_and_the_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as busy, caplog.at_level(logging.ERROR):
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        running = make(port=busy.getsockname()[1], port_probe="off").start()
        with running.step() as step:
            step.record(loss=1.0)
        assert running.port is None
        assert running.worker.flush(5)
        assert running.pipeline.step == 1
    assert "this rank will not be scraped" in caplog.text


def test_ranks_of_one_host_listen_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = free.getsockname()[1]
    monkeypatch.setenv("RANK_ID", "9")
    monkeypatch.setenv("RANK_SIZE", "16")
    monkeypatch.setenv("DEVICE_ID", "1")
    running = make(port=base - 1).start()
    assert running.port == base
    assert page(running)["mindspore_train_world_size",] == 16


@pytest.mark.parametrize("environment", [{"MS_ROLE": "MS_SCHED"}, {"MINDSPORE_EXPORTER_ENABLED": "false"}])
def test_the_scheduler_and_a_disabled_exporter_open_nothing(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = set(threading.enumerate())
    with make() as running:
        with running.step() as step:
            step.record(loss=1.0)
        with running.checkpoint(), running.evaluation():
            pass
    assert not running.running
    assert running.port is None
    assert set(threading.enumerate()) <= before


def test_a_bad_configuration_ends_the_run_unless_it_shall_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="windw"):
        make(windw=3)
    running = make(windw=3, on_config_error="warn")
    assert not running.start().running
    assert "windw" in caplog.text


def test_a_web_configuration_that_cannot_be_used_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match=r"web\.yaml"):
        make(web_config=tmp_path / "web.yaml").start()
    assert set(threading.enumerate()) <= before
    assert exporter.active() is None


def test_a_new_exporter_takes_the_place_of_the_one_before() -> None:
    first = make().start()
    second = make(run="other").start()
    assert not first.running
    assert exporter.active() is second


def test_the_attempt_and_the_baseline_survive_a_restart_of_the_same_configuration(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"state_dir": tmp_path, "baseline": {"from": "self", "steps": 20, "warmup_steps": 0}}
    for attempt in (1, 2, 3):
        running = make(**settings).start()
        wait_for_attempt(running)
        if attempt == 1:
            for number in range(30):
                with running.step(samples=1) as step:
                    step.record(loss=float(number))
        samples = page(running)
        assert samples["mindspore_train_attempt",] == attempt
        assert ("mindspore_train_baseline_loss", "mean") in samples
        running.stop()
    running = make(**settings, window=50).start()  # another configuration: another run for all that is known
    wait_for_attempt(running)
    assert page(running)["mindspore_train_attempt",] == 1


def test_no_attempt_is_claimed_where_no_state_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    running = make().start()
    with running.step() as step:
        step.record(loss=1.0)
    assert ("mindspore_train_attempt",) not in page(running)


def test_the_rank_announces_the_port_really_bound_and_takes_it_back(tmp_path: Path) -> None:
    running = make(discovery={"directory": tmp_path, "address": "127.0.0.1", "labels": {"team": "nlp"}}).start()
    entry = tmp_path / "loop-rank0.json"
    wait_for(entry.exists)
    (group,) = json.loads(entry.read_text())
    assert group["targets"] == [f"127.0.0.1:{running.port}"]
    assert group["labels"]["team"] == "nlp"
    running.stop()
    assert not entry.exists()


def test_a_forked_child_holds_neither_port_nor_records() -> None:
    running = make().start()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        state = {"running": running.running, "queue": len(running.queue), "active": exporter.active() is not None}
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        state["sockets"] = sum(link.startswith("socket:") for link in links)
        os.write(write_end, json.dumps(state).encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(read_end) as file:
        os.close(write_end)
        state = json.loads(file.read())
    before = sum(
        os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )
    assert state == {"running": False, "queue": 0, "active": False, "sockets": before - 1}
    assert page(running)


@contextmanager
def script(body: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that runs `body`; killed at the end of the scope."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "exporter"), "XDG_STATE_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_next_attempt_binds_the_same_port_while_a_worker_of_the_killed_one_still_lives(tmp_path: Path) -> None:
    body = """
        import os, time
        from mindspore_exporter import TrainingExporter
        running = TrainingExporter(port=0, listen="127.0.0.1", run="killed").start()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"x")  # the fork hooks have run
            time.sleep(30)
            os._exit(0)
        os.read(reading, 1)
        print(running.port, child, flush=True)
        time.sleep(30)
        """
    with script(body, tmp_path) as parent:
        assert parent.stdout is not None
        port, child = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait()
        try:
            os.kill(child, 0)  # the forked worker lives
            assert make(port=port, port_probe="off").start().port == port
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_exit_waits_for_the_last_scrape_of_a_known_scraper_and_shows_it_the_end(tmp_path: Path) -> None:
    body = """
        from mindspore_exporter import TrainingExporter
        with TrainingExporter(port=0, listen="127.0.0.1", run="linger") as running:
            with running.step() as step:
                step.record(loss=1.0)
            print(running.port, flush=True)
            input()
        """
    with script(body, tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        scraper = {"X-Prometheus-Scrape-Timeout-Seconds": "10", "User-Agent": "Prometheus/2.42"}
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/metrics"
        fetch(urllib.request.Request(url, headers=scraper))
        process.stdin.write("\n")
        process.stdin.flush()
        # A look that is no scrape shows the end and does not let the process go.
        wait_for(lambda: 'phase="finished",rank="0",run="linger"} 1.0' in fetch(urllib.request.Request(url)))
        assert process.poll() is None
        assert 'phase="finished",rank="0",run="linger"} 1.0' in fetch(urllib.request.Request(url, headers=scraper))
        assert process.wait(10) == 0


def fetch(request: urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def test_nobody_waits_where_nobody_scrapes(tmp_path: Path) -> None:
    body = """
        from mindspore_exporter import TrainingExporter
        with TrainingExporter(port=0, listen="127.0.0.1", run="alone") as running:
            with running.step() as step:
                step.record(loss=1.0)
        """
    with script(body, tmp_path) as process:
        _, errors = process.communicate(timeout=15)
        assert (process.returncode, "waiting" in errors) == (0, False)


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))"])
def test_a_sigterm_is_the_reason_and_the_exit_status_is_that_of_a_run_without_the_exporter(
    tmp_path: Path, handler: str
) -> None:
    body = f"""
        import signal, sys, time
        from mindspore_exporter import TrainingExporter
        {handler}
        with TrainingExporter(port=0, listen="127.0.0.1", run="term") as running:
            with running.step() as step:
                step.record(loss=1.0)
            print(running.port, flush=True)
            time.sleep(60)
        """
    with script(body, tmp_path) as process:
        assert process.stdout is not None
        scraper = {"X-Prometheus-Scrape-Timeout-Seconds": "10", "User-Agent": "Prometheus/2.42"}
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/metrics"
        fetch(urllib.request.Request(url, headers=scraper))
        process.terminate()
        wait_for(lambda: 'reason="sigterm",run="term"' in fetch(urllib.request.Request(url)))
        fetch(urllib.request.Request(url, headers=scraper))
        assert process.wait(10) == (3 if handler else -signal.SIGTERM)
