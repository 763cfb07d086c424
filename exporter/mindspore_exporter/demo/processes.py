"""Starting and ending the demo's processes.

msrun puts each rank into a session of its own and leaves them behind when it is terminated: neither its process group nor
its children say what it started. So this process adopts orphans, and what is to be stopped is whatever descends from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from ..errors import ExporterError

PR_SET_CHILD_SUBREAPER = 36
TERM_SECONDS = 3.0
"""A rank that is terminated publishes its end; data that nobody will read is not waited for longer."""
KILL_SECONDS = 10.0
FOREIGN_PREFIXES = ("MINDSPORE_EXPORTER_", "MS_", "RANK_", "OMPI_")
"""Variables of another run, which would go before the demo's own configuration."""


class DemoError(ExporterError):
    """The demo cannot begin, or a program of it failed."""


def start(command: Sequence[str | Path], log: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Start a program in `directory`, its output going to `log`, away from the terminal's signals."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN_PREFIXES)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def nothing_stays(kept: Collection[int]) -> Iterator[None]:
    """Scope at whose end no descendant of this process is left, except the process ids in `kept` at that time.

    SIGINT ends the scope as KeyboardInterrupt, SIGTERM and SIGHUP as SystemExit; while it stops the processes all three
    are without effect.
    """
    adopt_orphans()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # A shell starts background jobs with SIGINT ignored; whoever sends it to the demo means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit)
    if before[signal.SIGHUP] is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _exit)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        stop_descendants(kept)
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def adopt_orphans() -> None:
    """Let processes whose parent dies become children of this one, instead of init's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def stop_descendants(kept: Collection[int] = ()) -> None:
    """End every process that descends from this one, except those in `kept`: asked first, then killed."""
    for signum, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        descendants = [process for process in psutil.Process().children(recursive=True) if process.pid not in kept]
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signum)
        psutil.wait_procs(descendants, timeout=seconds)


def free_port(wanted: int = 0) -> int:
    """`wanted` where it is free on the loopback address, else a port that the system chooses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_lines(log: Path, count: int) -> str:
    """The end of a log file; empty where there is none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])
