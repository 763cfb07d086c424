"""The course of the demo: start, watch, compare, clean up."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import summary
from .processes import DemoError, free_port, last_lines, nothing_stays, start
from .prometheus import INTERVALS, PrometheusServer
from .table import LiveTable
from .views import RUN, EndpointView, PrometheusView, Row, View

LOOK_SECONDS = 1.0
STEPS_PER_SECOND = 500
"""More than the model does on any CPU: what a run that ends by time has as its last step."""


def run(options: argparse.Namespace) -> int:
    """The demo from begin to end; see `demo.main`."""
    if importlib.util.find_spec("mindspore") is None:
        raise DemoError("MindSpore is not installed in this Python: pip install 'mindspore-exporter[demo]'")
    left = _Left()
    try:
        with _directory(options.dir, left) as directory, nothing_stays(left.processes):
            server = PrometheusServer(directory)
            view = _view(options, server)
            status = _train_and_compare(options, directory, server.targets, view)
            left.directory = options.keep or status != 0
            if left.directory:
                _say(f"\nkept: {directory}")
            if options.keep and server.pid is not None:
                left.processes.add(server.pid)
                _say(f"Prometheus stays at {server.url}; stop it with: kill {server.pid}")
            return status
    except KeyboardInterrupt:
        _say("\nstopped; nothing is left running")
        raise


@dataclass
class _Left:
    """What outlives the demo."""

    processes: set[int] = field(default_factory=set)
    directory: bool = False


@contextlib.contextmanager
def _directory(chosen: Path | None, left: _Left) -> Iterator[Path]:
    """The directory of this run: the user's, which must be empty and stays, or a temporary one."""
    if chosen is not None:
        try:
            chosen.mkdir(parents=True, exist_ok=True)
            used = any(chosen.iterdir())
        except OSError as error:
            raise DemoError(f"--dir {chosen}: {error.strerror}") from None
        if used:
            raise DemoError(f"--dir {chosen}: is not empty; the data of two runs must not mix")
        yield chosen.resolve()
        return
    directory = Path(tempfile.mkdtemp(prefix="mindspore-exporter-demo-"))
    try:
        yield directory
    finally:
        if not left.directory:
            shutil.rmtree(directory, ignore_errors=True)


def _view(options: argparse.Namespace, server: PrometheusServer) -> View:
    if not options.no_prometheus:
        try:
            server.start(options.prometheus_port)
        except DemoError as error:
            _say(f"going on with the endpoints alone: {error}")
        else:
            changed = ", ".join(f"{key} {value}" for key, value in INTERVALS.items())
            _say(f"Prometheus at {server.url} with the shipped prometheus.yml; changed: {changed}")
            return PrometheusView(server.url)
    return EndpointView(server.targets)


def _train_and_compare(options: argparse.Namespace, directory: Path, targets: Path, view: View) -> int:
    length = f"{options.steps} steps" if options.seconds is None else f"{options.seconds:g} s"
    _say(f"training {length} on {options.ranks} ranks by msrun; logs in {directory / 'logs'}")
    msrun = _start_training(options, directory, targets)
    _watch(msrun, view, options.ranks)
    if msrun.returncode:
        _say_why_it_failed(directory, options.ranks, msrun.returncode)
        return 1
    stored = view.scrapes()
    comparisons = {
        rank: summary.compare(stored.get(rank, []), summary.read_log(directory / "run" / f"rank{rank}.jsonl"))
        for rank in range(options.ranks)
    }
    _say("")
    _say(summary.text(comparisons, view.did))
    return 0 if summary.agree(comparisons) else 1


def _start_training(options: argparse.Namespace, directory: Path, targets: Path) -> subprocess.Popen[bytes]:
    monitor = {
        "run": RUN,
        "port": options.port,
        "port_probe": "on",
        "listen": "127.0.0.1",
        "state_dir": str(directory / "state"),
        "discovery": {"directory": str(targets), "address": "127.0.0.1"},
    }
    (directory / "monitor.yaml").write_text(json.dumps(monitor, indent=2) + "\n", encoding="utf-8")
    script = Path(__file__).resolve().parents[1] / "examples" / "tiny_transformer.py"
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "mindspore.parallel.cluster.run",
        f"--worker_num={options.ranks}",
        f"--local_worker_num={options.ranks}",
        f"--master_port={free_port()}",
        f"--log_dir={directory / 'logs'}",
        "--join=True",
        "python3",
        script,
        f"--config={directory / 'monitor.yaml'}",
        f"--log={directory / 'run'}",
        *_length(options),
    ]
    return start(command, directory / "msrun.log", directory)


def _length(options: argparse.Namespace) -> list[str]:
    if options.seconds is None:
        return [f"--steps={options.steps}"]
    return [f"--seconds={options.seconds}", f"--steps={int(options.seconds * STEPS_PER_SECOND) + STEPS_PER_SECOND}"]


def _watch(msrun: subprocess.Popen[bytes], view: View, ranks: int) -> None:
    """Show the table until msrun has ended: the ranks end after their last scrape."""
    table, rows, began = LiveTable(sys.stdout, ranks), dict[int, Row](), time.monotonic()
    while True:
        ended = msrun.poll() is not None
        with contextlib.suppress(OSError, ValueError):  # a look that fails is made up for by the next
            rows.update(view.rows())
        note = f"from {view.name}, {time.monotonic() - began:.0f} s" + ("" if ended else "; Ctrl-C stops it")
        table.show(rows, note, last=ended)
        if ended:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            msrun.wait(LOOK_SECONDS)


def _say_why_it_failed(directory: Path, ranks: int, status: int) -> None:
    _say(f"\nthe training failed: msrun ended with status {status}")
    for log in [*(directory / "logs" / f"worker_{rank}.log" for rank in range(ranks)), directory / "msrun.log"]:
        _say(f"\n{log}:\n{last_lines(log, 15) or '(empty)'}")


def _say(text: str) -> None:
    print(text, flush=True)
