"""The shipped prometheus.yml on a real Prometheus, fed by the entries that ranks write."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from prometheus_server import PrometheusServer, wait_until

from mindspore_exporter import metrics
from mindspore_exporter.discovery import META_PREFIX, TargetFile
from mindspore_exporter.registry import Registry

pytestmark = pytest.mark.prometheus

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "prometheus" / "prometheus.yml"
DISCOVERY_SECONDS = 25.0
"""Prometheus gathers discovery's changes for 5 s, `targets` reads every 5 s; the rest is for a busy machine."""

TARGETS_PROGRAM = (
    "import argparse, sys; from mindspore_exporter import targets; parser = argparse.ArgumentParser();"
    " targets.add_arguments(parser); sys.exit(targets.main(parser.parse_args()))"
)
TARGET_MISMATCH = (
    (ROOT / "prometheus" / "README.md").read_text(encoding="utf-8").split("```promql\n")[1].split("```")[0]
)
"""The documented query for targets that answer for another run than discovery says."""


def quick(config: str) -> str:
    """The shipped configuration with intervals for a test."""
    config = config.replace("scrape_interval: 15s", "scrape_interval: 1s")
    config = config.replace("scrape_timeout: 10s", "scrape_timeout: 1s")
    return config.replace("refresh_interval: 30s", "refresh_interval: 1s")


def over_http(config: str, url: str) -> str:
    """The shipped configuration with its commented HTTP SD variant in place of the files."""
    config = config.replace(
        '    file_sd_configs:\n      - files: ["targets/*.json"]\n        refresh_interval: 30s\n', ""
    )
    config = re.sub(r"^    #(http_sd_configs:|  - url:|    refresh_interval)", r"    \1", config, flags=re.MULTILINE)
    return config.replace("http://127.0.0.1:19439/targets", url)


def all_switched_on(config: str) -> str:
    """The shipped configuration with every commented setting: # is followed by no space, or by two and more."""
    return re.sub(r"^( *)#(?=[^ \n]| {2,}[^ ])", r"\1", config, flags=re.MULTILINE)


@contextmanager
def rank_page(registry: Registry) -> Iterator[int]:
    """Serve the registry's page; gives the port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = registry.render()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def targets_program(directory: Path) -> Iterator[str]:
    """Run `targets DIR --serve`; gives the list's URL."""
    command = [sys.executable, "-c", TARGETS_PROGRAM, str(directory), "--serve", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "exporter")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield line.split(" at ")[-1].strip()
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(15)
    assert status == 0


@pytest.fixture
def registry() -> Registry:
    values = Registry({"run": "llm-7b", "rank": "3"})
    values.set(metrics.WORLD_SIZE, 8)
    values.set(metrics.LOSS, 2.5, "total")
    return values


def entry(directory: Path, port: int, run: str = "llm-7b") -> TargetFile:
    labels = {META_PREFIX + "world_size": "8", META_PREFIX + "host": "node-1", "cluster": "a"}
    return TargetFile(directory, run, 3, address="127.0.0.1", port=port, labels=labels)


def stored_loss(server: PrometheusServer) -> list[dict[str, object]]:
    return server.query("mindspore_train_loss")


def check_config(tmp_path: Path, config: str) -> str:
    promtool = shutil.which("promtool")
    assert promtool, "no `promtool` on PATH; it comes with Prometheus: apt-get install prometheus"
    path = tmp_path / "prometheus.yml"
    path.write_text(config, encoding="utf-8")
    result = subprocess.run([promtool, "check", "config", str(path)], capture_output=True, text=True, check=False)
    return result.stderr if result.returncode else ""


def test_shipped_configuration_is_valid(tmp_path: Path) -> None:
    assert check_config(tmp_path, SHIPPED.read_text(encoding="utf-8")) == ""


def test_every_commented_setting_of_the_shipped_configuration_is_valid(tmp_path: Path) -> None:
    config = all_switched_on(SHIPPED.read_text(encoding="utf-8"))
    assert all(f"\n{text}" in config for text in ("alerting:", "    http_sd_configs:", "  - job_name: npu-exporter"))
    assert check_config(tmp_path, config) == ""


def test_rank_is_scraped_while_its_file_is_there(registry: Registry) -> None:
    server = PrometheusServer(quick(SHIPPED.read_text(encoding="utf-8")))
    directory = server.directory / "targets"
    directory.mkdir()
    with rank_page(registry) as port:
        target = entry(directory, port)
        target.write()
        with server:
            (loss,) = wait_until(lambda: stored_loss(server), DISCOVERY_SECONDS, "scrape of the rank")
            assert loss["value"][1] == "2.5"  # type: ignore[index]
            assert loss["metric"] == {
                "__name__": "mindspore_train_loss",
                "run": "llm-7b",
                "rank": "3",
                "component": "total",
                "job": "mindspore",
                "instance": f"127.0.0.1:{port}",
                "cluster": "a",
            }
            (up,) = server.query("up")
            assert (up["metric"]["discovered_run"], up["metric"]["discovered_rank"]) == ("llm-7b", "3")
            assert server.query(TARGET_MISMATCH) == []
            target.remove()
            wait_until(lambda: not server.targets(), DISCOVERY_SECONDS, "drop of the rank")
            assert wait_until(lambda: not stored_loss(server), 5, "end of the rank's series")


def test_rank_is_found_over_http_sd_and_an_entry_of_another_run_shows(registry: Registry, tmp_path: Path) -> None:
    with rank_page(registry) as port:
        target = entry(tmp_path, port, run="other")
        target.write()
        with targets_program(tmp_path) as url:
            config = quick(over_http(SHIPPED.read_text(encoding="utf-8"), url))
            with PrometheusServer(config) as server:
                wait_until(lambda: stored_loss(server), DISCOVERY_SECONDS, "scrape of the rank")
                (mismatch,) = server.query(TARGET_MISMATCH)
                assert mismatch["metric"]["run"] == "other"
                target.remove()
                wait_until(lambda: not server.targets(), DISCOVERY_SECONDS, "drop of the rank")
