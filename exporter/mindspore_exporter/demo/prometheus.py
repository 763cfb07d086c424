"""The demo's Prometheus: the shipped configuration with short intervals, a free port, a directory of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from ..assets import write_assets
from .processes import DemoError, free_port, last_lines, start

INTERVALS = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s", "refresh_interval": "1s"}
"""What the demo changes in the shipped configuration: a run of seconds is scraped each second."""
START_SECONDS = 30.0


def short_intervals(shipped: str) -> str:
    """The shipped configuration with INTERVALS. Raises DemoError where it does not have one of them."""
    for key, value in INTERVALS.items():
        shipped, count = re.subn(rf"(?m)^( *{key}:) .*$", rf"\1 {value}", shipped)
        if not count:
            raise DemoError(f"prometheus.yml: has no {key}, which the demo sets to {value}")
    return shipped


class PrometheusServer:
    """Prometheus below `directory`; `targets` is the directory in which its configuration looks for the ranks."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._settings = directory / "monitoring" / "prometheus"
        self._log = directory / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.targets = self._settings / "targets"
        self.url = ""
        write_assets(directory / "monitoring", force=False)
        self.targets.mkdir()
        settings = self._settings / "prometheus.yml"
        settings.write_text(short_intervals(settings.read_text(encoding="utf-8")), encoding="utf-8")

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def start(self, port: int) -> None:
        """Start on `port`, or on another one where it is busy. Raises DemoError when there is none or it does not start."""
        program = shutil.which("prometheus")
        if program is None:
            raise DemoError("there is no `prometheus` on PATH (Debian, Ubuntu: apt-get install prometheus)")
        for wanted in (port, 0):  # somebody may take the port between the look and the start
            chosen = free_port(wanted)
            self._process = self._start(program, chosen)
            if self._is_ready(chosen):
                self.url = f"http://127.0.0.1:{chosen}"
                return
            self._process.kill()
            self._process.wait()
            self._process = None
            if "address already in use" not in last_lines(self._log, 20):
                break
        raise DemoError(f"Prometheus does not start: {last_lines(self._log, 1) or 'it says nothing'}")

    def _start(self, program: str, port: int) -> subprocess.Popen[bytes]:
        command = [
            program,
            f"--config.file={self._settings / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        return start(command, self._log, self._directory)

    def _is_ready(self, port: int) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2):
                    return True
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
            time.sleep(0.1)
        return False
