"""The wait for the last scrape at interpreter exit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass

import pytest

from mindspore_exporter.linger import linger_limit, wait_for_last_scrape


@dataclass(frozen=True)
class Scraper:
    last_seen: float
    interval: float | None


def seen_ago(seconds: float, interval: float | None) -> Scraper:
    return Scraper(time.monotonic() - seconds, interval)


def test_nobody_is_waited_for_when_nobody_has_scraped() -> None:
    assert linger_limit(None, []) == 0.0
    assert linger_limit(60.0, []) == 0.0


def test_a_scraper_not_seen_for_five_minutes_is_not_waited_for() -> None:
    assert linger_limit(None, [seen_ago(301, 15)]) == 0.0


@pytest.mark.parametrize(
    ("interval", "limit"), [(None, 20.0), (1, 20.0), (8, 20.0), (15, 37.5), (30, 75.0), (60, 90.0), (300, 90.0)]
)
def test_the_limit_is_two_and_a_half_intervals_between_20_and_90_seconds(interval: float | None, limit: float) -> None:
    assert linger_limit(None, [seen_ago(1, interval)]) == limit


def test_the_longest_interval_among_the_recent_scrapers_counts() -> None:
    assert linger_limit(None, [seen_ago(1, 10), seen_ago(20, 30), seen_ago(400, 36)]) == 75.0


def test_a_configured_limit_is_taken_as_it_is() -> None:
    assert linger_limit(3.0, [seen_ago(1, 60)]) == 3.0
    assert linger_limit(0.0, [seen_ago(1, 60)]) == 0.0


def test_the_wait_ends_when_everybody_has_the_final_page() -> None:
    waiting = [["prometheus-a", "prometheus-b"], ["prometheus-b"], []]
    assert wait_for_last_scrape(lambda: waiting.pop(0), 30.0, poll=0.001)
    assert waiting == []


def test_no_wait_and_no_log_line_when_everybody_has_the_final_page(caplog: pytest.LogCaptureFixture) -> None:
    assert wait_for_last_scrape(list, 30.0)
    assert caplog.text == ""


def test_the_wait_says_once_how_long_it_is_at_most(caplog: pytest.LogCaptureFixture) -> None:
    assert not wait_for_last_scrape(lambda: ["prometheus"], 0.05, poll=0.01)
    assert [record.message for record in caplog.records] == [
        "exporter: waiting at most 0 s for the last scrape; Ctrl-C ends it"
    ]


def test_a_set_wake_event_ends_the_wait() -> None:
    wake = threading.Event()
    wake.set()
    assert not wait_for_last_scrape(lambda: ["prometheus"], 600.0, wake=wake)


def test_ctrl_c_ends_the_wait_at_once() -> None:
    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    assert not wait_for_last_scrape(interrupted, 600.0)


def run_at_exit(script: str, interrupt: bool = False) -> subprocess.CompletedProcess[str]:
    head = """
        import os, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        from mindspore_exporter.linger import ExitLinger, wait_for_last_scrape
        class Member:
            def __init__(self, name="a", limit=0.0):
                self.name, self.limit = name, limit
                self.said = False
            def unserved(self):
                if not self.said:
                    self.said = True
                    print("lingers", self.name, os.getpid() == parent, flush=True)
                return ["prometheus"] if self.limit else []
            def linger(self):
                print("done", self.name, wait_for_last_scrape(self.unserved, self.limit), flush=True)
        parent = os.getpid()
        exit_linger = ExitLinger()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    first = ""
    if interrupt:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    return subprocess.CompletedProcess(process.args, process.returncode, first + out, errors)


def test_a_finished_process_lingers_and_exits_with_0() -> None:
    ended = run_at_exit("exit_linger.add(Member())")
    assert (ended.returncode, ended.stdout) == (0, "lingers a True\ndone a True\n")


def test_a_failed_process_lingers_and_keeps_its_exit_code() -> None:
    ended = run_at_exit("exit_linger.add(Member()); sys.exit(3)")
    assert (ended.returncode, ended.stdout) == (3, "lingers a True\ndone a True\n")
    ended = run_at_exit("exit_linger.add(Member()); raise ValueError('of the training')")
    assert (ended.returncode, ended.stdout) == (1, "lingers a True\ndone a True\n")


def test_a_member_added_twice_lingers_once_and_a_discarded_one_never() -> None:
    ended = run_at_exit(
        """
        a, b = Member("a"), Member("b")
        exit_linger.add(a); exit_linger.add(a); exit_linger.add(b)
        exit_linger.discard(b); exit_linger.discard(b)
        """
    )
    assert ended.stdout == "lingers a True\ndone a True\n"


def test_an_error_of_one_member_does_not_keep_the_next_from_lingering() -> None:
    ended = run_at_exit(
        """
        class Broken:
            def linger(self):
                raise RuntimeError("server gone")
        exit_linger.add(Broken()); exit_linger.add(Member())
        """
    )
    assert (ended.returncode, ended.stdout) == (0, "lingers a True\ndone a True\n")
    assert "server gone" in ended.stderr


def test_a_forked_child_does_not_linger() -> None:
    ended = run_at_exit(
        """
        exit_linger.add(Member())
        child = os.fork()
        if child:
            print("child", os.waitpid(child, 0)[1], flush=True)
        """
    )
    assert ended.stdout == "child 0\nlingers a True\ndone a True\n"


def test_a_member_added_in_a_forked_child_lingers_there_alone() -> None:
    ended = run_at_exit(
        """
        exit_linger.add(Member("parent"))
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        else:
            exit_linger.add(Member("child"))
        """
    )
    assert ended.stdout == "lingers child False\ndone child True\nlingers parent True\ndone parent True\n"


def test_ctrl_c_at_exit_ends_the_wait_and_keeps_the_exit_code() -> None:
    ended = run_at_exit("exit_linger.add(Member(limit=600.0)); sys.exit(3)", interrupt=True)
    assert (ended.returncode, ended.stdout) == (3, "lingers a True\ndone a False\n")


def test_ctrl_c_at_exit_ends_the_wait_although_a_c_library_handles_sigint() -> None:
    # MindSpore's handler: what Python does not know of, and would end the process.
    ended = run_at_exit(
        """
        import ctypes, signal
        ctypes.CDLL(None).signal(signal.SIGINT, 0)
        exit_linger.add(Member(limit=600.0))
        """,
        interrupt=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "lingers a True\ndone a False\n")


def test_the_wait_ends_at_its_limit() -> None:
    started = os.times().elapsed
    ended = run_at_exit("exit_linger.add(Member(limit=0.2))")
    assert ended.stdout == "lingers a True\ndone a False\n"
    assert os.times().elapsed - started < 20
