"""Specification of `doctor.py`: each fault is found on a real endpoint, with its remedy."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspore_exporter import TrainingExporter, cli, doctor, exporter, metrics
from mindspore_exporter.config import load
from mindspore_exporter.doctor import Patient


@pytest.fixture
def running() -> Iterator[TrainingExporter]:
    started = TrainingExporter(None, port=0, listen="127.0.0.1", run="ill", signals=False).start()
    yield started
    left = exporter.active()
    if left is not None:
        left.stop()


def patient(port: int | None = None, **settings: Any) -> Patient:
    return Patient(None, "127.0.0.1", None, None, None if port is None else range(port, port + 1), load(**settings))


def seen(examined: Patient, *checks: Any) -> list[tuple[str, str]]:
    return [(finding.status, finding.what) for check in checks for finding in check(examined)]


def test_a_healthy_rank_has_no_problem(running: TrainingExporter, capsys: pytest.CaptureFixture[str]) -> None:
    with running.step() as step:
        step.record(loss=1.0)
    assert running.worker.flush(5)
    assert cli.main(["doctor", "--ports", str(running.port)]) == 0
    output = capsys.readouterr().out
    assert f"port {running.port}: run ill rank 0, training" in output
    assert "rank 0: training, 1 steps done" in output
    assert "run ill: 1 of 1 ranks answer on this host" in output
    assert output.rstrip().endswith("0 problems")


def test_no_endpoint_is_a_problem_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert cli.main(["doctor", "--ports", str(port), "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)
    (problem,) = [finding for finding in findings if finding["status"] == "problem"]
    assert problem["check"] == "endpoint"
    assert problem["remedy"]


def test_a_port_that_does_not_answer_is_not_taken_for_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TIMEOUT_SECONDS", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        found = seen(patient(silent.getsockname()[1]), doctor.check_endpoints)
    assert found[0][0] == "warning"
    assert "accepts but does not answer" in found[0][1]


def test_a_rank_that_stands_still_is_found(running: TrainingExporter) -> None:
    with running.step() as step:
        step.record(loss=1.0)
    assert running.worker.flush(5)
    examined = patient(running.port)
    seen(examined, doctor.check_endpoints)
    (rank,) = examined.ranks
    rank.samples[metrics.LAST_STEP_TIMESTAMP.name,] -= 10_000
    assert seen(examined, doctor.check_callback)[0][0] == "problem"


def test_errors_of_the_exporter_are_told(running: TrainingExporter) -> None:
    running.hook_errors = 3
    assert running.worker.flush(5)
    examined = patient(running.port)
    seen(examined, doctor.check_endpoints)
    assert seen(examined, doctor.check_exporter_itself) == [("problem", "rank 0: errors: hook 3")]


def test_another_run_than_expected_is_told(running: TrainingExporter) -> None:
    examined = patient(running.port)
    examined.run = "well"
    seen(examined, doctor.check_endpoints)
    assert ("problem", "run well is not here; seen: ill") in seen(examined, doctor.check_world)


def test_a_bad_configuration_is_told_and_the_other_checks_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "monitor.yaml").write_text("prt: 1\n")
    assert cli.main(["doctor", str(tmp_path / "monitor.yaml"), "--ports", "1"]) == 1
    output = capsys.readouterr().out
    assert "did you mean 'port'?" in output
    assert "rank environment" in output


def test_a_discovery_directory_that_is_missing_is_told(tmp_path: Path) -> None:
    found = seen(patient(discovery={"directory": tmp_path / "none"}), doctor.check_discovery)
    assert found[0][0] == "problem"


def test_a_check_that_fails_itself_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_nothing(examined: Patient) -> Iterator[doctor.Finding]:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", (check_nothing, doctor.check_versions))
    findings = doctor.examine(patient())
    assert findings[0].what == "the check failed: RuntimeError: boom"
    assert findings[1].check == "versions"


@pytest.mark.parametrize("ports", ["x", "5-1", "0-3", "1-70000"])
def test_ports_that_are_none_are_refused(ports: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--ports", ports]) == 2
    assert "allowed: FIRST-LAST" in capsys.readouterr().err


def test_the_remedies_stand_below_the_findings_and_problems_come_last() -> None:
    text = doctor.report([
        doctor.Finding("a", "problem", "broken", "mend it"), doctor.Finding("b", "ok", "fine"),
    ])  # fmt: skip
    assert text.splitlines() == [
        "ok   b                 fine", "FAIL a                 broken", " " * 23 + "-> mend it", "", "1 problem",
    ]  # fmt: skip
