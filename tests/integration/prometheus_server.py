"""A real Prometheus for a test: its own directory, a port that the system chose, nothing left afterwards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

START_SECONDS = 30.0
STOP_SECONDS = 15.0


def wait_until(condition: Callable[[], T], seconds: float, what: str, every: float = 0.2) -> T:
    """Ask until the answer is true; gives the answer. Fails, with the last answer, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen in {seconds:.0f} s; last seen: {answer!r}")
        time.sleep(every)


class PrometheusServer:
    """`with PrometheusServer(config) as server:` runs Prometheus on the configuration's text.

    `directory` is where prometheus.yml lies, so relative paths in the configuration (rules/*.yaml, targets/*.json) are
    below it; it may be filled before `with`. `arguments` are added to the command line.
    """

    def __init__(self, config: str, arguments: Sequence[str] = ()) -> None:
        self._config = config
        self._arguments = tuple(arguments)
        self._temporary = tempfile.TemporaryDirectory(prefix="prometheus-test-")
        self.directory = Path(self._temporary.name)
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PrometheusServer:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Result of an instant query now: a list of `{"metric": labels, "value": [time, text]}`."""
        data = self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return list(data["result"])

    def targets(self) -> list[dict[str, Any]]:
        """The active targets: `labels`, `discoveredLabels`, `scrapeUrl`, `health`, `lastError`, ..."""
        return list(self._get("/api/v1/targets?state=active")["activeTargets"])

    def reload(self, config: str | None = None) -> None:
        """Read the configuration again, after replacing it by `config` where one is given."""
        if config is not None:
            (self.directory / "prometheus.yml").write_text(config, encoding="utf-8")
        with urllib.request.urlopen(urllib.request.Request(self.url + "/-/reload", method="POST"), timeout=10):
            pass

    def log(self) -> str:
        """What Prometheus has logged so far."""
        path = self.directory / "prometheus.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _start(self) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise RuntimeError("no `prometheus` on PATH; these tests need a real one: apt-get install prometheus")
        config = self.directory / "prometheus.yml"
        config.write_text(self._config, encoding="utf-8")
        command = [
            program,
            f"--config.file={config}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--web.enable-lifecycle",
            *self._arguments,
        ]
        with (self.directory / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        port = wait_until(self._port, START_SECONDS, "listening of Prometheus", every=0.05)
        self.url = f"http://127.0.0.1:{port}"
        wait_until(self._ready, START_SECONDS, "readiness of Prometheus", every=0.05)

    def _port(self) -> str | None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"Prometheus ended with status {self._process.returncode}:\n{self.log()[-3000:]}")
        match = re.search(r'msg="Listening on" address=\S+:(\d+)', self.log())
        return match[1] if match else None

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return dict(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path}: {error.code}: {error.read().decode(errors='replace')[:500]}") from None

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._temporary.cleanup()
