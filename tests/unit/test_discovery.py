"""What an entry of one rank says, and whose it is."""

from __future__ import annotations

import json
import os
import random
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspore_exporter import metrics
from mindspore_exporter.discovery import (
    EXPIRY_SECONDS,
    MAX_LABEL_NAME,
    MAX_LABEL_VALUE,
    MAX_LABELS,
    META_LABELS,
    META_PREFIX,
    TargetFile,
    refresh_delay,
)
from mindspore_exporter.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[2] / "prometheus" / "prometheus.yml"


def entry(directory: Path, run: str = "llm-7b", rank: int = 3, **overrides: Any) -> TargetFile:
    values: dict[str, Any] = {"address": "node-1", "port": 19443, "labels": {}, **overrides}
    return TargetFile(directory, run, rank, **values)


def age(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(path, (moment, moment))


def seconds_old(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def test_entry_has_one_group_with_the_bound_port_and_the_labels(tmp_path: Path) -> None:
    labels = {
        META_PREFIX + "world_size": "8",
        META_PREFIX + "host": "node-1",
        META_PREFIX + "local_rank": "3",
        "team": "a",
    }
    target = entry(tmp_path, labels=labels)
    target.write()
    assert target.path == tmp_path / "llm-7b-rank3.json"
    (group,) = json.loads(target.path.read_bytes())
    assert group == {
        "targets": ["node-1:19443"],
        "labels": {**labels, META_PREFIX + "run": "llm-7b", META_PREFIX + "rank": "3"},
    }
    assert set(META_LABELS) <= group["labels"].keys()


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_entry_is_readable_by_the_group_and_writable_by_its_owner_alone_under_any_umask(
    tmp_path: Path, umask: int
) -> None:
    target = entry(tmp_path)
    before = os.umask(umask)
    try:
        target.write()
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.path.stat().st_mode) == 0o640


def test_scheme_is_written_only_for_https(tmp_path: Path) -> None:
    entry(tmp_path, rank=0).write()
    entry(tmp_path, rank=1, scheme="https").write()
    schemes = [json.loads(path.read_bytes())[0]["labels"].get("__scheme__") for path in sorted(tmp_path.iterdir())]
    assert schemes == [None, "https"]


def test_ipv6_address_is_bracketed(tmp_path: Path) -> None:
    target = entry(tmp_path, address="fd00::7")
    target.write()
    assert json.loads(target.path.read_bytes())[0]["targets"] == ["[fd00::7]:19443"]


def test_restarted_rank_replaces_its_entry_and_leaves_no_other_file(tmp_path: Path) -> None:
    entry(tmp_path, port=19443).write()
    entry(tmp_path, port=19444).write()
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_bytes())[0]["targets"] == ["node-1:19444"]


def test_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.path.mkdir()
    with pytest.raises(OSError, match="directory"):
        target.write()
    assert list(tmp_path.iterdir()) == [target.path]


def test_missing_directory_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    target = entry(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        target.write()
    assert not (tmp_path / "absent").exists()


def test_touch_refreshes_the_time(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.write()
    age(target.path, 300)
    target.touch()
    assert seconds_old(target.path) < 60


def test_touch_does_not_rewrite_what_is_there(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.write()
    inode = target.path.stat().st_ino
    target.touch()
    assert target.path.stat().st_ino == inode


def test_touch_writes_a_vanished_entry_again(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.write()
    target.path.unlink()
    target.touch()
    assert json.loads(target.path.read_bytes())[0]["targets"] == ["node-1:19443"]


def test_touch_repairs_a_damaged_entry(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.path.write_text("[{")
    target.touch()
    assert json.loads(target.path.read_bytes())[0]["targets"] == ["node-1:19443"]


def test_touch_leaves_a_live_entry_of_another_process_alone_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older, newer = entry(tmp_path, port=19443), entry(tmp_path, port=19444)
    older.write()
    newer.write()
    age(newer.path, 300)
    older.touch()
    older.touch()
    assert json.loads(newer.path.read_bytes())[0]["targets"] == ["node-1:19444"]
    assert seconds_old(newer.path) > 200
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_touch_takes_the_name_back_when_the_other_process_stopped_refreshing(tmp_path: Path) -> None:
    older, newer = entry(tmp_path, port=19443), entry(tmp_path, port=19444)
    newer.write()
    age(newer.path, EXPIRY_SECONDS + 60)
    older.touch()
    assert json.loads(older.path.read_bytes())[0]["targets"] == ["node-1:19443"]


def test_remove_takes_the_entry_away(tmp_path: Path) -> None:
    target = entry(tmp_path)
    target.write()
    target.remove()
    assert list(tmp_path.iterdir()) == []


def test_remove_of_a_missing_entry_is_fine(tmp_path: Path) -> None:
    entry(tmp_path).remove()


def test_remove_leaves_the_entry_of_the_next_attempt(tmp_path: Path) -> None:
    first, second = entry(tmp_path, port=19443), entry(tmp_path, port=19444)
    first.write()
    second.write()
    first.remove()
    assert second.path.exists()


def test_symbolic_link_under_the_entrys_name_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = entry(tmp_path)
    target.path.symlink_to(victim)
    target.write()
    assert victim.read_text() == "precious"
    assert not target.path.is_symlink()


@pytest.mark.parametrize(
    "label",
    ["job", "instance", "run", "rank", "le", "component", "phase", "__address__", "__metrics_path__", "9a", "a-b"],
)
def test_label_that_steers_the_scrape_or_hides_a_series_own_label_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(ConfigError, match=label):
        entry(tmp_path, labels={label: "x"})


@pytest.mark.parametrize("label", ["cluster", "namespace", "node", "team"])
def test_label_that_only_names_the_target_is_accepted(tmp_path: Path, label: str) -> None:
    assert label not in {name for family in metrics.CATALOGUE.values() for name in family.labels}
    entry(tmp_path, labels={label: "x"}).write()


@pytest.mark.parametrize("value", ["x" * (MAX_LABEL_VALUE + 1), "two\nlines", "\x1b[2J", "\ud800"])
def test_label_value_that_would_fail_a_scrape_or_a_terminal_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="team"):
        entry(tmp_path, labels={"team": value})


def test_more_labels_than_a_scrape_may_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(MAX_LABELS)):
        entry(tmp_path, labels={f"label_{number}": "x" for number in range(MAX_LABELS + 1)})


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"address": "http://node-1"}, "http://node-1"),
        ({"address": ""}, "address"),
        ({"address": "fe80::1%eth0"}, "zone"),
        ({"port": 0}, "port 0"),
        ({"scheme": "ftp"}, "ftp"),
        ({"run": "../up"}, "up"),
    ],
)
def test_value_that_prometheus_could_not_use_is_refused_by_name(tmp_path: Path, overrides: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        entry(tmp_path, **overrides)


def test_scrape_limits_of_the_shipped_configuration_admit_every_label_that_an_entry_may_have() -> None:
    (job,) = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))["scrape_configs"]
    widest = max(len(family.labels) for family in metrics.CATALOGUE.values())
    of_every_series = len(("__name__", "run", "rank", "job", "instance"))
    assert of_every_series + widest + MAX_LABELS <= job["label_limit"]
    assert job["label_name_length_limit"] == MAX_LABEL_NAME
    assert job["label_value_length_limit"] == MAX_LABEL_VALUE


def test_refreshes_are_about_a_minute_apart_and_differ_between_ranks() -> None:
    delays = [refresh_delay(random.Random(seed)) for seed in range(200)]
    assert all(48 <= delay <= 72 for delay in delays)
    assert len(set(delays)) > 190
