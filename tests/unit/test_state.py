"""Specification of `state.py`: what survives a restart, and what must not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspore_exporter import state
from mindspore_exporter.baseline import Baseline
from mindspore_exporter.config import load
from mindspore_exporter.state import RunState, StateFile


def file(directory: Path, run: str = "llm", rank: int = 0, world: int = 8, digest: str = "abc") -> StateFile:
    return StateFile(directory, run, rank, world, digest)


def test_what_was_saved_is_found_by_the_next_attempt(tmp_path: Path) -> None:
    saved = RunState(3, 1200, Baseline(loss_mean=1.5, step_seconds=0.2))
    file(tmp_path / "new").save(saved)
    assert file(tmp_path / "new").load() == saved
    assert (tmp_path / "new" / "llm-rank0.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["llm-rank0.json"]


def test_nothing_is_found_where_nothing_was_saved(tmp_path: Path) -> None:
    assert file(tmp_path).load() is None


@pytest.mark.parametrize("other", [{"world": 16}, {"digest": "def"}])
def test_a_state_of_another_world_size_or_configuration_is_ignored(tmp_path: Path, other: dict[str, object]) -> None:
    file(tmp_path).save(RunState(3, 1200, None))
    assert file(tmp_path, **other).load() is None  # type: ignore[arg-type]


def test_runs_and_ranks_do_not_share_a_file(tmp_path: Path) -> None:
    file(tmp_path).save(RunState(3, 1200, None))
    assert file(tmp_path, run="other").load() is None
    assert file(tmp_path, rank=1).load() is None


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        "\x00\xff",
        "x" * 100_000,
        '{"format": 99}',
        "attempt:0",
        "attempt:x",
        "highest_step:-1",
        "baseline:[1]",
    ],
)
def test_a_damaged_state_is_ignored_and_never_an_error(tmp_path: Path, damage: str) -> None:
    target = file(tmp_path)
    target.save(RunState(3, 1200, None))
    if ":" in damage and not damage.startswith("{"):
        key, value = damage.split(":")
        data = json.loads(target.path.read_text())
        data[key] = json.loads(value) if value != "x" else "x"
        damage = json.dumps(data)
    target.path.write_bytes(damage.encode("latin-1"))
    assert target.load() is None


def test_a_save_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = file(tmp_path)
    target.save(RunState(3, 1200, None))

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        target.save(RunState(4, 1300, None))
    assert target.load() == RunState(3, 1200, None)
    assert len(list(tmp_path.iterdir())) == 1


def test_attempts_count_on_and_the_highest_step_never_falls() -> None:
    first = state.next_attempt(None)
    assert (first.attempt, first.highest_step) == (1, 0)
    later = state.advance(first, 500, Baseline(loss_mean=1.0))
    again = state.advance(state.next_attempt(later), 300, None)
    assert again == RunState(2, 500, Baseline(loss_mean=1.0))


def test_the_digest_changes_with_what_a_baseline_means_and_with_nothing_else() -> None:
    digest = state.config_hash(load())
    assert digest == state.config_hash(load(port=1, run="x", thresholds={"plateau_steps": 5}))
    assert digest != state.config_hash(load(window=50))
    assert digest != state.config_hash(load(loss={"total": "lm"}))


def test_no_state_is_kept_where_none_would_survive(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOME": "/root"}
    assert state.default_directory(load(), pod) is None
    assert state.default_directory(load(state_dir=tmp_path), pod) == tmp_path
    assert state.default_directory(load(), {"HOME": "/home/u"}) == Path("/home/u/.local/state/mindspore-exporter")
    assert state.default_directory(load(), {"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/mindspore-exporter")
    assert state.default_directory(load(), {}) is None
