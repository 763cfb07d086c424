"""Specification of `registry.py` and of the catalogue's form."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from mindspore_exporter import metrics
from mindspore_exporter.registry import Registry


@pytest.fixture
def registry() -> Registry:
    return Registry({"run": "llm-7b", "rank": "3"}, clock=lambda: 1234.5)


def full(registry: Registry) -> Registry:
    """Every family of the catalogue with a value."""
    for family in metrics.CATALOGUE.values():
        values = family.values or ("x",)
        if family.kind in ("histogram", "summary"):
            registry.observe(family, 0.3)
        elif family.kind == "stateset":
            registry.state(family, family.values[0])
        elif family.kind == "info":
            registry.info(family, dict.fromkeys(family.labels, "v"))
        elif len(family.labels) == 1:
            for value in values:
                registry.set(family, 1.0, value)
        else:
            registry.set(family, 1.0, *("x" for _ in family.labels))
    return registry


def test_every_series_carries_run_and_rank(registry: Registry) -> None:
    for family in text_families(full(registry).render().decode()):
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["rank"]) == ("llm-7b", "3"), sample.name


@pytest.mark.parametrize("profile", ["full", "lean"])
def test_the_openmetrics_parser_accepts_the_whole_catalogue(registry: Registry, profile: str) -> None:
    families = list(openmetrics_families(full(registry).render(openmetrics=True, profile=profile).decode()))
    assert len(families) > 30


@pytest.mark.parametrize("profile", ["full", "lean"])
def test_promtool_finds_nothing_to_say_about_the_whole_catalogue(registry: Registry, profile: str) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's package prometheus; make test installs it"
    done = subprocess.run(
        [promtool, "check", "metrics"], input=full(registry).render(profile=profile), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_no_family_emits_a_target_label_and_names_follow_the_conventions() -> None:
    for family in metrics.CATALOGUE.values():
        assert not set(family.labels) & set(metrics.FORBIDDEN_LABELS), family.name
        assert re.fullmatch(
            r"mindspore_(rank|train|checkpoint|eval|model|device|allocator|guard|exporter|relay)_[a-z0-9_]+",
            family.name,
        )
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.name.endswith("_info") == (family.kind == "info"), family.name
        assert family.help.endswith((".", ")")), family.name


def test_counters_exist_at_zero_before_the_first_step(registry: Registry) -> None:
    page = registry.render().decode()
    assert 'mindspore_train_steps_total{rank="3",run="llm-7b"} 0.0' in page
    for reason in ("loss", "gradient_norm", "step_seconds"):
        assert f'mindspore_train_spikes_total{{quantity="{reason}",rank="3",run="llm-7b"}} 0.0' in page
    assert "mindspore_device_faults_total" not in page
    registry.activate("device")
    assert 'mindspore_device_faults_total{rank="3",run="llm-7b",severity="critical"} 0.0' in registry.render().decode()


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_known_is_absent_not_last_known(registry: Registry, value: float | None) -> None:
    registry.set(metrics.LOSS_SLOPE, 2.0)
    registry.set(metrics.LOSS_SLOPE, value)
    assert "mindspore_train_loss_slope{" not in registry.render().decode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_shown_as_it_is(registry: Registry, value: float) -> None:
    registry.set(metrics.LOSS, value, "total")
    shown = [
        s.value
        for f in text_families(registry.render().decode())
        for s in f.samples
        if s.name == "mindspore_train_loss"
    ]
    assert str(shown) == str([value])


def test_a_state_set_has_exactly_one_state(registry: Registry) -> None:
    registry.state(metrics.PHASE, "training")
    samples = [
        s for f in text_families(registry.render().decode()) for s in f.samples if s.name == "mindspore_train_phase"
    ]
    assert len(samples) == len(metrics.PHASES)
    assert [s.labels["phase"] for s in samples if s.value == 1] == ["training"]
    with pytest.raises(ValueError, match="no state 'sleeping'; allowed: starting"):
        registry.state(metrics.PHASE, "sleeping")


def test_a_user_named_label_is_capped_and_what_is_dropped_is_counted_once_a_value(registry: Registry) -> None:
    for _ in range(3):
        for number in range(20):
            registry.set(metrics.EVAL_VALUE, 1.0, f"metric{number}")
    assert (
        len([line for line in registry.render().decode().splitlines() if line.startswith("mindspore_eval_value{")])
        == 16
    )
    assert registry.value(metrics.SERIES_DROPPED) == 4


def test_a_counter_cannot_be_decreased(registry: Registry) -> None:
    with pytest.raises(ValueError, match="mindspore_train_steps_total: a counter cannot be decreased, got -1"):
        registry.add(metrics.STEPS, -1)


def test_a_sink_of_n_steps_adds_n_to_its_bucket(registry: Registry) -> None:
    registry.observe(metrics.STEP_SECONDS, 0.07, count=50)
    page = registry.render().decode()
    assert 'mindspore_train_step_seconds_bucket{le="0.05",rank="3",run="llm-7b"} 0.0' in page
    assert 'mindspore_train_step_seconds_bucket{le="0.1",rank="3",run="llm-7b"} 50.0' in page
    assert registry.value(metrics.STEP_SECONDS) == pytest.approx(3.5)


def test_a_histogram_bound_is_inclusive(registry: Registry) -> None:
    registry.observe(metrics.STEP_SECONDS, 0.05)
    assert 'le="0.05",rank="3",run="llm-7b"} 1.0' in registry.render().decode()


def test_lean_is_a_subset_of_full_but_for_what_only_lean_has(registry: Registry) -> None:
    page = full(registry)
    names = {(s.name, tuple(sorted(s.labels.items()))) for m in page.collect("full") for s in m.samples}
    lean = {(s.name, tuple(sorted(s.labels.items()))) for m in page.collect("lean") for s in m.samples}
    only_lean = {name for name, _ in lean - names}
    assert only_lean == {"mindspore_device_health_level", "mindspore_exporter_errors_total"}


def test_lean_fits_its_budget_of_60_series_with_a_device(registry: Registry) -> None:
    assert full(registry).series("lean") <= 60


def test_groups_choose_families(registry: Registry) -> None:
    full(registry)
    names = {metric.name for metric in registry.collect(groups={"device"})}
    assert names
    assert all(name.startswith("mindspore_device") for name in names)


def test_no_created_series_and_no_timestamps(registry: Registry) -> None:
    page = full(registry).render(openmetrics=True).decode()
    assert "_created" not in page
    assert all(len(line.rsplit("} ", 1)[-1].split()) == 1 for line in page.splitlines() if not line.startswith("#"))


def test_the_class_of_metrics_does_not_depend_on_an_inherited_multiprocess_directory() -> None:
    script = (
        "from mindspore_exporter.registry import Registry; from mindspore_exporter import metrics;"
        "r = Registry({'run': 'a', 'rank': '0'}); r.add(metrics.STEPS, 5); print(r.render().decode())"
    )
    done = subprocess.run(
        ["python3", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": ":".join(__import__("sys").path),
            "PROMETHEUS_MULTIPROC_DIR": "/nonexistent",
            "PATH": __import__("os").environ["PATH"],
        },
    )
    assert 'mindspore_train_steps_total{rank="0",run="a"} 5.0' in done.stdout, done.stderr


def test_the_reference_is_plain_data() -> None:
    rows = json.loads(json.dumps(metrics.reference()))
    assert {row["name"] for row in rows} == set(metrics.CATALOGUE)
