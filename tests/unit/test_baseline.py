"""Specification of `baseline.py`."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from mindspore_exporter import baseline, metrics
from mindspore_exporter.baseline import Baseline, BaselineLearner
from mindspore_exporter.cli import main
from mindspore_exporter.errors import ConfigError
from mindspore_exporter.registry import Registry
from unit.test_detectors import seen


def learn(losses: list[float | None], steps: int = 50, warmup: int = 10, **changes: object) -> BaselineLearner:
    learner = BaselineLearner(steps, warmup)
    for step, loss in enumerate(losses, 1):
        learner.observe(seen(step, loss, **{"step_seconds": 0.5, "samples": 8.0, "gradient_norm": 2.0, **changes}))
    return learner


def test_it_is_not_ready_before_its_records_came_after_the_warm_up() -> None:
    assert learn([1.0] * 59).baseline is None
    assert learn([1.0] * 60).baseline is not None


def test_the_warm_up_is_not_learnt_from() -> None:
    learnt = learn([100.0] * 10 + [1.0] * 50).baseline
    assert learnt is not None
    assert (learnt.loss_mean, learnt.loss_max) == (1.0, 1.0)


def test_it_has_the_typical_values_of_the_run() -> None:
    learnt = learn([1.0] * 60).baseline
    assert learnt == Baseline(1.0, 0.0, 1.0, 0.5, 16.0, 2.0, None)


def test_the_deviation_is_that_of_the_detrended_loss() -> None:
    draw = random.Random(3)
    noise = [draw.gauss(0, 0.05) for _ in range(60)]
    learnt = learn([3.0 - 0.02 * step + noise[step] for step in range(60)]).baseline
    assert learnt is not None
    assert learnt.loss_stddev == pytest.approx(statistics.stdev(noise[10:]), rel=0.2)


def test_outliers_and_what_is_not_finite_are_dropped() -> None:
    draw = random.Random(4)
    losses: list[float | None] = [1.0 + draw.gauss(0, 0.01) for _ in range(60)]
    losses[20], losses[30], losses[40] = 50.0, math.nan, math.inf
    learnt = learn(losses).baseline
    assert learnt is not None
    assert learnt.loss_max is not None
    assert learnt.loss_max < 1.1


def test_a_rank_whose_loss_is_not_valid_learns_the_rest() -> None:
    learnt = learn([None] * 60).baseline
    assert learnt == Baseline(step_seconds=0.5, samples_per_second=16.0, gradient_norm=2.0)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    saved = Baseline(1.5, 0.1, 2.0, 0.25, 64.0, None, None)
    baseline.save(saved, tmp_path / "base.json", run="a")
    assert baseline.load(tmp_path / "base.json") == saved


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a baseline; its format must be"),
        ('{"format": "other"}', "is not a baseline"),
        (json.dumps({"format": baseline.FORMAT, "baseline": []}), "must have keys and values, has a list"),
        (
            json.dumps({"format": baseline.FORMAT, "baseline": {"los": 1}}),
            "no key 'los' in a baseline; allowed: loss_mean",
        ),
        (
            json.dumps({"format": baseline.FORMAT, "baseline": {"loss_mean": "x"}}),
            "loss_mean = 'x'; allowed: a finite number",
        ),
        (json.dumps({"format": baseline.FORMAT, "baseline": {"step_seconds": -1}}), "allowed: 0 and above"),
        (json.dumps({"format": baseline.FORMAT, "baseline": {"loss_mean": math.nan}}), "allowed: a finite number"),
        (" " * 70_000, "larger than 65536 bytes"),
    ],
)
def test_a_file_that_is_no_baseline_is_told_with_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        baseline.load(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_says_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory; allowed: 'self', or a file"):
        baseline.load(tmp_path / "none.json")


def test_a_baseline_is_read_from_a_ranks_page() -> None:
    registry = Registry({"run": "llm", "rank": "0"})
    with pytest.raises(ConfigError, match="no baseline yet"):
        baseline.from_page(registry.render().decode())
    registry.set(metrics.BASELINE_LOSS, 1.5, "mean")
    registry.set(metrics.BASELINE_STEP_SECONDS, 0.25)
    assert baseline.from_page(registry.render().decode()) == ("llm", Baseline(loss_mean=1.5, step_seconds=0.25))
    with pytest.raises(ConfigError, match="not a Prometheus page"):
        baseline.from_page("<html> nothing {")


def test_the_program_says_why_a_page_cannot_be_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baseline", "save", "--from", "http://127.0.0.1:9/metrics", "--out", str(tmp_path / "b.json")]) == 2
    assert "http://127.0.0.1:9/metrics: cannot be fetched" in capsys.readouterr().err
    assert main(["baseline", "save", "--from", "/etc/passwd", "--out", str(tmp_path / "b.json")]) == 2
    assert "allowed: the URL of a rank's page" in capsys.readouterr().err
