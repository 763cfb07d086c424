"""`doctor` against a real Prometheus: targets that are up, missing, down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.prometheus_server import PrometheusServer, wait_until
from mindspore_exporter import TrainingExporter, doctor
from mindspore_exporter.config import load
from mindspore_exporter.doctor import Finding, Patient

pytestmark = pytest.mark.prometheus

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 900ms}}
rule_files: [rules/*.yaml]
scrape_configs:
  - job_name: mindspore
    honor_labels: {honor}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
RULES = """
groups:
  - name: training
    rules: [{record: "run:mindspore_train_step:max", expr: "max by (run) (mindspore_train_step)"}]
"""


@pytest.fixture
def running() -> Iterator[TrainingExporter]:
    started = TrainingExporter(None, port=0, listen="127.0.0.1", run="ill", signals=False).start()
    yield started
    started.stop()


def examined(port: int, url: str, run: TrainingExporter) -> list[Finding]:
    patient = Patient(None, "127.0.0.1", url, None, range(port, port + 1), load())
    list(doctor.check_endpoints(patient))
    return list(doctor.check_prometheus(patient))


def test_a_rank_that_is_scraped_is_told_as_up_with_its_rules(running: TrainingExporter, tmp_path: Path) -> None:
    assert running.port is not None
    server = PrometheusServer(CONFIG.format(port=running.port, honor="false"))
    (server.directory / "rules").mkdir()
    (server.directory / "rules" / "training.yaml").write_text(RULES)
    with server:
        wait_until(lambda: server.query("up == 1"), 20, "a scrape")
        findings = examined(running.port, server.url, running)
    assert {finding.status for finding in findings} == {"ok"}
    assert any("1 rules about mindspore_ metrics" in finding.what for finding in findings)
    assert any("is up" in finding.what for finding in findings)


def test_a_rank_that_prometheus_does_not_know_and_a_dead_target_are_problems(running: TrainingExporter) -> None:
    assert running.port is not None
    with PrometheusServer(CONFIG.format(port=9, honor="true")) as server:
        wait_until(lambda: server.query("up == 0"), 20, "a failed scrape")
        findings = examined(running.port, server.url, running)
    problems = [finding.what for finding in findings if finding.status == "problem"]
    assert problems == [f"rank 0 (port {running.port}) is no target of this Prometheus"]
    assert any("honor_labels: true" in finding.what for finding in findings if finding.status == "warning")


def test_a_prometheus_that_is_not_there_is_a_problem(running: TrainingExporter) -> None:
    assert running.port is not None
    (finding,) = examined(running.port, "http://127.0.0.1:9", running)
    assert finding.status == "problem"
    assert "does not answer" in finding.what
