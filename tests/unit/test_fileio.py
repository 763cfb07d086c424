"""Specification of `fileio.py`: a hung file system stalls nobody."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspore_exporter.fileio import MAX_ABANDONED, MAX_WAITING, FileThread, write_atomically


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What a task on a dead mount waits for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def wait_until_runs(files: FileThread) -> None:
    deadline = time.monotonic() + 5
    while files._running is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_tasks_run_in_order_beside_the_caller_and_tell_their_result() -> None:
    files, results = FileThread(), []
    for number in range(3):
        files.submit(
            f"task {number}",
            lambda n=number: (n, threading.current_thread().name),
            done=lambda r, e: results.append((r, e)),
        )
    assert files.flush(5)
    assert results == [((n, "mindspore-exporter-files"), None) for n in range(3)]
    files.stop(1)


def test_an_error_is_told_counted_and_does_not_end_the_thread() -> None:
    files, errors = FileThread(), []

    def fails() -> None:
        raise OSError(30, "Read-only file system")

    files.submit("fails", fails, done=lambda result, error: errors.append(str(error)))
    files.submit("fails without anybody to tell", fails)
    files.submit("works", lambda: None)
    assert files.flush(5)
    assert errors == ["[Errno 30] Read-only file system"]
    assert files.errors == 2
    files.stop(1)


def test_a_task_that_still_waits_is_replaced_by_one_of_its_name(hang: threading.Event) -> None:
    files, done = FileThread(), []
    files.submit("hold", hang.wait)
    wait_until_runs(files)
    for number in range(5):
        files.submit("save state", lambda n=number: done.append(n))
    hang.set()
    assert files.flush(5)
    assert done == [4]
    files.stop(1)


def test_submitting_never_blocks_and_the_queue_is_bounded(hang: threading.Event) -> None:
    files = FileThread()
    files.submit("hold", hang.wait)
    wait_until_runs(files)
    for number in range(MAX_WAITING + 10):
        files.submit(f"task {number}", lambda: None)
    assert files.errors == 10
    hang.set()
    files.stop(2)


def test_a_hung_thread_is_given_up_and_another_one_goes_on(hang: threading.Event) -> None:
    files, done = FileThread(), []
    files.submit("hung", hang.wait, limit=0.05)
    files.submit("next", lambda: done.append(True))
    assert files.flush(5)
    assert (done, files.hung, files.abandoned) == ([True], True, 1)
    files.stop(1)


def test_after_too_many_hung_threads_nothing_more_is_tried(hang: threading.Event) -> None:
    files = FileThread()
    for number in range(MAX_ABANDONED + 1):
        files.submit(f"hung {number}", hang.wait, limit=0.02)
        assert files.flush(5)
    files.submit("refused", lambda: None)
    assert files.errors == MAX_ABANDONED + 2
    assert files.abandoned == MAX_ABANDONED + 1
    files.stop(1)


def test_a_real_file_that_never_answers_holds_up_neither_flush_nor_stop(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    files = FileThread()
    files.submit("open", lambda: fifo.open("rb").close())
    assert not files.flush(0.1)
    files.stop(0.1)
    os.close(os.open(fifo, os.O_WRONLY))  # the reader is there: this lets it go


def test_nothing_is_left_after_stop() -> None:
    before = set(threading.enumerate())
    files = FileThread()
    files.submit("task", lambda: None)
    files.stop(5)
    files.stop(5)
    files.submit("too late", lambda: None)
    assert set(threading.enumerate()) <= before


def test_a_forked_child_has_no_tasks_and_starts_no_thread(hang: threading.Event) -> None:
    files = FileThread()
    files.submit("hold", hang.wait)
    files.submit("waits", lambda: None)
    files.abandon_in_child()
    files.submit("in the child", lambda: None)
    assert files._thread is None
    assert files.flush(0.1)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "file"
    write_atomically(target, b"one", 0o640)
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"one", 0o640)
    with pytest.raises(OSError, match="directory"):
        write_atomically(tmp_path, b"two", 0o640)
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "file", b"two", 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
