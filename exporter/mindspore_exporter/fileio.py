"""File input and output beside the training, with a time limit: a hung network file system stalls nobody.

A system call on a dead mount cannot be interrupted, so the thread that made it is given up and another one goes on.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

TASK_SECONDS = 10.0
"""Time that a task may take before its thread is given up."""
MAX_ABANDONED = 3
"""Threads given up before nothing more is tried: each holds a stack until the mount comes back."""
MAX_WAITING = 32


@dataclass(frozen=True)
class _Task:
    name: str
    work: Callable[[], Any]
    limit: float
    done: Callable[[Any, BaseException | None], None] | None


class FileThread:
    """Runs tasks one after the other in a daemon thread that is started when there is something to do.

    `errors` counts tasks that raised or were refused, `hung` says whether a thread was given up.
    """

    def __init__(self) -> None:
        self.errors = 0
        self.abandoned = 0
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, _Task] = OrderedDict()
        self._running: _Task | None = None
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def hung(self) -> bool:
        """Whether a task took longer than its limit and its thread was given up."""
        return self.abandoned > 0

    def submit(
        self,
        name: str,
        task: Callable[[], T],
        limit: float = TASK_SECONDS,
        done: Callable[[T | None, BaseException | None], None] | None = None,
    ) -> None:
        """Have `task` run, then `done(result, error)` in the same thread. Never blocks on a file. A task of the same name
        that still waits is replaced; what finds too much waiting, or too many threads hung, is dropped and counted."""
        with self._changed:
            self._give_up_a_hung_thread()
            if self._stopping:
                return
            full = name not in self._waiting and len(self._waiting) >= MAX_WAITING
            if full or self.abandoned > MAX_ABANDONED:
                self.errors += 1
                return
            self._waiting[name] = _Task(name, task, limit, done)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mindspore-exporter-files", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, limit: float) -> bool:
        """Wait until everything submitted was done, at most `limit` seconds. False where it was not."""
        return self._wait_for(lambda: not self._waiting and self._running is None, limit)

    def stop(self, limit: float) -> None:
        """End the thread after what waits; at most `limit` seconds. A thread that hangs is left behind."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            self._wait_for(lambda: self._thread is None, limit)
            if self._thread is None:
                thread.join(limit)

    def abandon_in_child(self) -> None:
        """In a forked child, which has no such thread: forget everything, take no lock."""
        self._changed = threading.Condition()
        self._waiting = OrderedDict()
        self._thread, self._running, self._stopping = None, None, True

    def _wait_for(self, condition: Callable[[], bool], limit: float) -> bool:
        deadline = time.monotonic() + limit
        with self._changed:
            while not condition():
                self._give_up_a_hung_thread()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return condition()
                self._changed.wait(min(remaining, 0.1))
        return True

    def _give_up_a_hung_thread(self) -> None:
        """Called with the lock held, by whoever comes by: nobody else watches the clock."""
        task = self._running
        if task is None or time.monotonic() - self._began <= task.limit:
            return
        self.abandoned += 1
        self.errors += 1
        self._running, self._thread = None, None
        log.error(
            "exporter: %s has taken over %.0f s, the file system hangs; its thread is given up", task.name, task.limit
        )
        if self._waiting and self.abandoned <= MAX_ABANDONED:
            self._thread = threading.Thread(target=self._run, name="mindspore-exporter-files", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._waiting and not self._stopping and self._thread is me:
                    self._changed.wait()
                if self._thread is not me:
                    return
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                _, task = self._waiting.popitem(last=False)
                self._running, self._began = task, time.monotonic()
            self._do(task)
            with self._changed:
                if self._thread is not me:
                    return
                self._running = None
                self._changed.notify_all()

    def _do(self, task: _Task) -> None:
        result, error = None, None
        try:
            result = task.work()
        except Exception as raised:
            error = raised
            self.errors += 1
            if task.done is None:
                log.warning("exporter: %s failed: %s", task.name, raised)
        if task.done is not None:
            try:
                task.done(result, error)
            except Exception:
                self.errors += 1
                log.exception("exporter: what follows %s failed", task.name)


def write_atomically(path: Path, data: bytes, mode: int) -> None:
    """Write a file whole or not at all: a temporary file in the same directory, synchronised, then a rename. Raises
    OSError, and leaves no temporary file behind then."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
