"""Specification of `config.py`: one readable error, precedence, limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspore_exporter import config
from mindspore_exporter.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "monitor.yaml"
    path.write_text(text)
    return path


def test_without_anything_the_defaults_hold() -> None:
    loaded = config.load()
    assert (loaded.port, loaded.window, loaded.baseline.source, loaded.stall.floor_seconds) == (
        19440,
        100,
        "self",
        180.0,
    )


def test_arguments_beat_environment_and_environment_beats_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "port: 1\nwindow: 11\nrun: from-yaml\n")
    monkeypatch.setenv("MINDSPORE_EXPORTER_PORT", "2")
    monkeypatch.setenv("MINDSPORE_EXPORTER_WINDOW", "12")
    loaded = config.load(path, port=3)
    assert (loaded.port, loaded.window, loaded.run) == (3, 12, "from-yaml")


def test_nested_keys_have_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPORE_EXPORTER_THRESHOLDS__DEVICE_MEMORY_RATIO", "0.85")
    monkeypatch.setenv("MINDSPORE_EXPORTER_BASELINE__FROM", "base.json")
    loaded = config.load()
    assert loaded.thresholds == {"device_memory_ratio": 0.85}
    assert loaded.baseline.source == "base.json"


def test_the_yaml_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPORE_EXPORTER_CONFIG", str(write(tmp_path, "port: 5\n")))
    assert config.load().port == 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prt: 1\n", "prt (YAML): no such key; did you mean 'port'?"),
        ("port: 70000\n", "port (YAML) = 70000: Input should be less than or equal to 65535"),
        ("run: a b\n", "run (YAML) = 'a b': allowed: 1 to 63 letters, digits and . _ -"),
        ("read: sometimes\n", "read (YAML) = 'sometimes': Input should be 'auto', 'worker', 'hook' or 'off'"),
        ("loss: {totl: x}\n", "loss.totl (YAML): no such key; did you mean 'total'?"),
        ("thresholds: {device_temperature: 80}\n", "did you mean 'device_temperature_celsius'?"),
        ("loss: {names: [a, b], total: c}\n", "loss.total is 'c' but loss.names has only a, b"),
        ("discovery: {labels: {'my-team': x}}\n", "label 'my-team': allowed are letters, digits and _"),
        ("evaluation: {max_batches: 3}\n", "evaluation.every_steps (YAML)"),
        ("- a\n", "must hold keys and values at its top, has a list"),
        ("1: 2\n", "the key 1 must be a text"),
        ("port: [\n", "is not YAML"),
        ("a: &x [1]\nb: *x\n", "anchors and aliases are not allowed"),
        ("run: !!python/object/apply:os.system [true]\n", "is not YAML"),
        ("port: &p 1\n", "anchors and aliases are not allowed"),
    ],
)
def test_a_bad_configuration_names_key_value_and_what_is_allowed(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, text))
    assert said in str(caught.value)
    assert "monitor.yaml" in str(caught.value)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(write(tmp_path, "prt: 1\nwindow: 0\n"))
    assert "prt" in str(caught.value)
    assert "window" in str(caught.value)


def test_a_misspelt_variable_is_an_error_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPORE_EXPORTER_PROT", "1")
    with pytest.raises(ConfigError, match="environment variable MINDSPORE_EXPORTER_PROT: did you mean 'port'"):
        config.load()


def test_a_bad_variable_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPORE_EXPORTER_PORT", "http")
    with pytest.raises(ConfigError, match="port \\(environment MINDSPORE_EXPORTER_PORT\\) = 'http'"):
        config.load()


def test_a_file_that_is_missing_or_too_large_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        config.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="larger than 262144 bytes"):
        config.load(write(tmp_path, "# " + "x" * 300_000))


def test_a_loaded_configuration_does_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        config.load().port = 1  # type: ignore[misc]


def test_the_reference_has_a_meaning_for_every_key() -> None:
    rows = config.reference()
    assert len(rows) > 25
    assert [key for key, _, _, meaning in rows if not meaning] == []
