"""Notices the checkpoints that MindSpore's `ModelCheckpoint` writes: begin, end, failure, and when a file is whole.

The callback is watched from outside by wrapping two methods of the instance, because the phase must say `checkpointing`
while the save runs, not after it. What is wrapped is put back by `release`.
"""

from __future__ import annotations

import logging
import multiprocessing.process
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from .records import CheckpointBegan, CheckpointEnded, CheckpointWhole, Record

log = logging.getLogger(__name__)

DECIDES, SAVES = "_check_save_ckpt", "_save_ckpt"
"""`ModelCheckpoint._save_ckpt` asks `_check_save_ckpt` whether this step is due (MindSpore 2.9 and 2.10,
mindspore/train/callback/_checkpoint.py)."""
WHOLE_LIMIT_SECONDS = 3600.0
"""An asynchronous save that takes longer than this has failed."""
WRITER = "asyn_save_ckpt"
"""Name of MindSpore's saving thread or process (mindspore/train/serialization.py)."""
CLOCK_SLACK_SECONDS = 2.0
"""A network file system's clock may be this far behind."""


class CheckpointWatch:
    """Watches every `ModelCheckpoint`-like callback of one training.

    `put` receives the records; `step` gives the global step; `await_file(path, began_wall, step)` is called for an
    asynchronous save.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        put: Callable[[Record], None],
        step: Callable[[], int],
        await_file: Callable[[str, float, int], None],
    ) -> None:
        self._put = put
        self._step = step
        self._await_file = await_file
        self._wrapped: list[Any] = []
        for callback in callbacks:
            if callable(getattr(callback, DECIDES, None)) and callable(getattr(callback, SAVES, None)):
                self._wrap(callback)

    def _wrap(self, callback: Any) -> None:
        decide, save = getattr(callback, DECIDES), getattr(callback, SAVES)
        began: list[tuple[int, float]] = []

        def decides(*args: Any, **kwargs: Any) -> Any:
            due = decide(*args, **kwargs)
            if due:
                step, wall = self._step(), time.time()
                began.append((step, wall))
                self._put(CheckpointBegan(time.monotonic(), wall, step))
            return due

        def saves(*args: Any, **kwargs: Any) -> Any:
            began.clear()
            failed = True
            try:
                result = save(*args, **kwargs)
                failed = False
                return result
            finally:
                if began:
                    self._ended(callback, *began[0], failed)

        try:
            setattr(callback, DECIDES, decides)
            setattr(callback, SAVES, saves)
        except AttributeError:
            log.warning(
                "the checkpoints of %s cannot be watched: its methods cannot be wrapped", type(callback).__name__
            )
            return
        self._wrapped.append(callback)

    def _ended(self, callback: Any, step: int, wall: float, failed: bool) -> None:
        """Runs in the training thread, in a `finally`: it must not raise."""
        try:
            asynchronous = bool(getattr(getattr(callback, "_config", None), "async_save", False)) and not failed
            file = str(getattr(callback, "latest_ckpt_file_name", "")) if asynchronous else ""
            self._put(CheckpointEnded(time.monotonic(), time.time(), step, failed, file or None))
            if file:
                self._await_file(file, wall, step)
        except Exception:
            log.exception("a checkpoint of step %d could not be noted", step)

    def release(self) -> None:
        """Put the callbacks' own methods back."""
        for callback in self._wrapped:
            for name in (DECIDES, SAVES):
                callback.__dict__.pop(name, None)
        self._wrapped.clear()


def look_for_whole_file(path: str, began_wall: float, step: int) -> CheckpointWhole | None:
    """What became of an asynchronous save; None while it is being written.

    MindSpore writes under another name and renames at the end, so a file of that name is whole. A file that is not
    there although nobody writes any more, or not for `WHOLE_LIMIT_SECONDS`, is a failure.
    """
    writing = somebody_writes()
    try:
        written = os.stat(path).st_mtime
    except FileNotFoundError:
        written = None
    now, wall = time.monotonic(), time.time()
    if written is not None and written >= began_wall - CLOCK_SLACK_SECONDS:
        age = max(0.0, wall - max(written, began_wall))
        return CheckpointWhole(now - age, wall - age, step, failed=False)
    if not writing or wall - began_wall > WHOLE_LIMIT_SECONDS:
        return CheckpointWhole(now, wall, step, failed=True)
    return None


def somebody_writes() -> bool:
    """Whether MindSpore's saving thread or process is at work. Processes are looked at without waiting for them:
    reaping a child here would take its exit status from MindSpore."""
    if any(thread.name == WRITER for thread in threading.enumerate()):
        return True
    for child in list(getattr(multiprocessing.process, "_children", ())):
        if child.name == WRITER and child.pid is not None:
            try:
                if psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
                    return True
            except psutil.Error:
                continue
    return False
