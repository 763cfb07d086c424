"""The demo's own parts: options, configuration, table, summary, and that nothing it starts can stay behind."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mindspore_exporter import demo, metrics
from mindspore_exporter.demo import summary, table
from mindspore_exporter.demo.processes import DemoError, free_port
from mindspore_exporter.demo.prometheus import short_intervals
from mindspore_exporter.demo.show import run
from mindspore_exporter.demo.summary import LoggedStep
from mindspore_exporter.demo.views import STEP_COUNT, STEP_SUM, EndpointView, Row, Scrape, page, speeds
from mindspore_exporter.discovery import TargetFile
from mindspore_exporter.registry import Registry
from mindspore_exporter.server import PageRequest
from unit.serving import endpoint, wait_until

ROOT = Path(__file__).resolve().parents[2]

# --- options --------------------------------------------------------------------------------------------------------


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    demo.add_arguments(parser)
    return parser.parse_args(words)


def test_without_options_two_ranks_train_300_steps() -> None:
    chosen = options()
    assert (chosen.ranks, chosen.steps, chosen.seconds, chosen.keep) == (2, 300, None, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "0"), "'0' is not a number from 1 on"),
        (("--steps", "-3"), "'-3' is not a number from 1 on"),
        (("--seconds", "nan"), "'nan' is not a time in seconds"),
        (("--port", "70000"), "'70000' is not a port"),
        (("--steps", "3", "--seconds", "3"), "not allowed with"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_the_value(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((argparse.ArgumentError, SystemExit)) as refused:
        options(*words)
    assert said in str(refused.value) + capsys.readouterr().err


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    (tmp_path / "data").mkdir()
    with pytest.raises(DemoError, match="is not empty"):
        run(options("--dir", str(tmp_path)))


def test_a_python_without_mindspore_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"pip install 'mindspore-exporter\[demo\]'"):
        run(options())


# --- the configuration ----------------------------------------------------------------------------------------------


def test_of_the_shipped_configuration_only_intervals_change() -> None:
    shipped = (ROOT / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    changed = short_intervals(shipped)
    differing = [
        (before.strip(), after.strip())
        for before, after in zip(shipped.splitlines(), changed.splitlines(), strict=True)
        if before != after
    ]
    assert {after for _, after in differing} == {
        "scrape_interval: 1s",
        "scrape_timeout: 1s",
        "evaluation_interval: 1s",
        "refresh_interval: 1s",
    }
    assert all(before.split(":")[0] == after.split(":")[0] for before, after in differing)


def test_a_configuration_without_an_interval_is_an_error() -> None:
    with pytest.raises(DemoError, match="scrape_timeout"):
        short_intervals("global:\n  scrape_interval: 15s\n")


# --- what is seen ---------------------------------------------------------------------------------------------------


def registry_of_a_rank() -> Registry:
    registry = Registry({"run": "demo", "rank": "1"})
    with registry.transaction():
        registry.state(metrics.PHASE, "training")
        registry.set(metrics.STEP, 7)
        registry.set(metrics.LOSS, 2.5, "total")
        registry.set(metrics.LOSS, 0.5, "aux")
        registry.set(metrics.LEARNING_RATE, 0.001, "0")
        registry.set(metrics.SAMPLES, 112)
        registry.observe_all(metrics.STEP_SECONDS, [(0.02, 6)])
    return registry


def test_of_a_page_phase_total_loss_and_first_rate_are_taken() -> None:
    seen = page(registry_of_a_rank().render().decode())
    assert seen.phase == "training"
    assert seen.values[metrics.LOSS.name] == 2.5
    assert seen.values[metrics.LEARNING_RATE.name] == 0.001
    assert (seen.values[STEP_COUNT], seen.values[STEP_SUM]) == (6, pytest.approx(0.12))


def test_endpoints_are_found_by_their_entries_and_what_was_seen_is_kept(tmp_path: Path) -> None:
    registry = registry_of_a_rank()

    def render(request: PageRequest) -> bytes:
        return registry.render(request.openmetrics, request.profile, request.groups)

    view = EndpointView(tmp_path)
    assert view.rows() == {}
    with endpoint(render) as server:
        assert server.port is not None
        TargetFile(tmp_path, "demo", 1, address="127.0.0.1", port=server.port, labels={}).write()
        assert view.rows()[1].step == 7
        assert [scraper.last_seen > 0 for scraper in server.scrapers()] == [True], "a rank must wait for the demo"
    assert view.rows() == {}
    (scrape,) = view.scrapes()[1]
    assert (scrape.phase, scrape.values[metrics.SAMPLES.name]) == ("training", 112)


def test_a_broken_entry_does_not_end_the_demo(tmp_path: Path) -> None:
    (tmp_path / "demo-rank0.json").write_text("{}")
    assert EndpointView(tmp_path).rows() == {}


def test_speeds_are_taken_between_two_scrapes() -> None:
    first = Scrape(10.0, "training", {metrics.SAMPLES.name: 100, STEP_COUNT: 10, STEP_SUM: 1.0})
    last = Scrape(14.0, "training", {metrics.SAMPLES.name: 180, STEP_COUNT: 15, STEP_SUM: 2.0})
    assert speeds(first, last) == (20.0, 0.2)
    assert speeds(first, first) == (None, None)


# --- the table ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_row_shows_each_value_in_its_column_and_dashes_for_the_unknown() -> None:
    head, known, unknown = table.lines({0: Row("training", 12, 1.23456, 0.002, 640.0, 0.025)}, ranks=2)
    assert head.split() == ["rank", "phase", "step", "loss", "lr", "samples/s", "step", "time"]
    assert known.split() == ["0", "training", "12", "1.2346", "2.000e-03", "640.0", "25.0", "ms"]
    assert unknown.split() == ["1", *"------"]
    assert len(head) == len(known) == len(unknown)


def test_a_loss_that_is_nan_is_shown_as_nan() -> None:
    assert "nan" in table.lines({0: Row("training", 1, math.nan)}, ranks=1)[1]


def test_on_a_terminal_the_table_is_drawn_over_itself() -> None:
    stream = Terminal()
    live = table.LiveTable(stream, 1, Clock())
    live.show({}, "first")
    live.show({}, "second")
    assert stream.getvalue().count("\x1b[3F\x1b[J") == 1


def test_elsewhere_a_block_is_written_every_five_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    live = table.LiveTable(stream, 1, clock)
    for second in range(8):
        clock.now = second
        live.show({}, f"at {second}")
    live.show({}, "end", last=True)
    assert [line for line in stream.getvalue().splitlines() if line.startswith(("at", "end"))] == [
        "at 0",
        "at 5",
        "end",
    ]
    assert "\x1b" not in stream.getvalue()


# --- the summary ----------------------------------------------------------------------------------------------------

LOG = [LoggedStep(step, 3.0 / step, 0.001 * step, 16 * step, 100.0 + step, 50.0 + step) for step in (1, 2, 3)]


def scrape(step: int, phase: str = "training", **changed: float) -> Scrape:
    values = {
        metrics.STEP.name: float(step),
        metrics.STEPS.name: float(step),
        metrics.SAMPLES.name: 16.0 * step,
        metrics.LOSS.name: 3.0 / step,
        metrics.LEARNING_RATE.name: 0.001 * step,
        metrics.LAST_STEP_TIMESTAMP.name: 100.0 + step,
        STEP_COUNT: step - 1.0,
        STEP_SUM: step - 1.0,
    }
    names = {"loss": metrics.LOSS.name, "rate": metrics.LEARNING_RATE.name, "samples": metrics.SAMPLES.name}
    values.update({names.get(key, key): value for key, value in changed.items()})
    return Scrape(200.0 + step, phase, values)


def differing(scrapes: list[Scrape], log: list[LoggedStep]) -> list[str]:
    return [one.quantity for one in summary.compare(scrapes, log) if not one.agrees]


def test_numbers_of_the_run_itself_agree() -> None:
    scrapes = [Scrape(200.0, "compiling", {metrics.STEP.name: 0.0}), scrape(1), scrape(3, "finished")]
    assert differing(scrapes, LOG) == []
    (losses,) = [one for one in summary.compare(scrapes, LOG) if one.quantity == "loss, each scrape"]
    assert (losses.stored, losses.logged) == ("2 scrapes", "2 steps")


@pytest.mark.parametrize(
    ("scrapes", "found"),
    [
        ([scrape(3)], ["phase"]),
        ([scrape(2, "finished")], ["step", "steps in all", "samples in all", "last loss", "last learning rate"]),
        ([scrape(3, "finished", loss=math.nextafter(1.0, 2))], ["last loss", "loss, each scrape"]),
        ([scrape(3, "finished", rate=0.00301)], ["last learning rate", "learning rate, each scrape"]),
        ([scrape(1, loss=2.9), scrape(3, "finished")], ["loss, each scrape"]),
        ([scrape(1, samples=15), scrape(3, "finished")], ["samples, each scrape"]),
        ([scrape(3, "finished", **{STEP_SUM: 2.1})], ["mean step time"]),
        ([scrape(3, "finished", **{metrics.LAST_STEP_TIMESTAMP.name: 103.01})], ["time of the step, each scrape"]),
    ],
)
def test_each_number_that_differs_is_found(scrapes: list[Scrape], found: list[str]) -> None:
    assert differing(scrapes, LOG) == found


def test_a_series_that_was_never_stored_differs() -> None:
    bare = Scrape(203.0, "finished", {metrics.STEP.name: 3.0})
    assert {"last loss", "loss, each scrape", "last learning rate", "samples in all"} <= set(differing([bare], LOG))


def test_a_loss_that_is_nan_on_both_sides_is_equal() -> None:
    log = [*LOG[:2], dataclasses.replace(LOG[2], loss=math.nan)]
    assert differing([scrape(3, "finished", loss=math.nan)], log) == []
    assert "last loss" in differing([scrape(3, "finished")], log)


def test_a_rate_within_float32_is_equal() -> None:
    assert differing([scrape(3, "finished", rate=0.003 * (1 + 5e-8))], LOG) == []


@pytest.mark.parametrize(
    ("scrapes", "log"), [([], LOG), ([scrape(3, "finished")], [])], ids=["nothing stored", "no log"]
)
def test_a_rank_of_which_nothing_is_known_differs(scrapes: list[Scrape], log: list[LoggedStep]) -> None:
    assert len(differing(scrapes, log)) == 1


def test_the_summary_says_which_rank_and_number_differ() -> None:
    comparisons = {0: summary.compare([scrape(3, "finished")], LOG), 1: summary.compare([scrape(3, "failed")], LOG)}
    text = summary.text(comparisons, "Prometheus stored")
    (marked,) = [line for line in text.splitlines() if "DIFFERS" in line]
    assert marked.split()[:4] == ["1", "phase", "failed", "finished"]
    assert "differs from what the run logged, in 1 places" in text
    assert not summary.agree(comparisons)


def test_a_log_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    whole = json.dumps(dataclasses.asdict(LOG[0])) + "\n"
    path.write_text(whole + whole[:20], encoding="utf-8")
    assert summary.read_log(path) == LOG[:1]
    assert summary.read_log(tmp_path / "absent") == []


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_busy_port_is_replaced_and_a_free_one_taken() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert free_port(port) != port
    assert free_port(port) == port


LAUNCHER = """
import pathlib, subprocess, sys, time
from mindspore_exporter.demo.processes import nothing_stays, start

# As msrun does: a child in a session of its own, which it leaves behind. At the ordinary end it is deaf to SIGTERM too.
deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if sys.argv[2] == "end" else ""
rank = f"import signal, time; {deaf}print('up', flush=True); time.sleep(600)"
launcher = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', {rank!r}], start_new_session=True)"
log = pathlib.Path(sys.argv[1])
with nothing_stays(set()):
    start([sys.executable, "-c", launcher], log, log.parent).wait()
    while "up" not in log.read_text():
        time.sleep(0.01)
    print("orphaned", flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
"""


@pytest.mark.parametrize(
    ("signum", "status"),
    [(None, 0), (signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)],
    ids=["end", "INT", "TERM"],
)
def test_orphans_of_a_launcher_do_not_outlive_the_demo(tmp_path: Path, signum: int | None, status: int) -> None:
    mark = f"DEMO_TEST={tmp_path}"
    program = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "log"), "wait" if signum else "end"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "exporter"), "DEMO_TEST": str(tmp_path)},
        text=True,
    )
    assert program.stdout is not None
    with program, program.stdout:
        assert program.stdout.readline() == "orphaned\n"
        if signum is not None:
            assert len(marked(mark)) == 2
            program.send_signal(signum)
        assert program.wait(20) == status
    assert wait_until(lambda: not marked(mark), 5.0), marked(mark)


def marked(mark: str) -> list[int]:
    """Processes that have the mark in their environment."""
    name, _, value = mark.partition("=")
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
