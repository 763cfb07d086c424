"""The bounded queue between the training thread and the worker, and what the training thread is doing right now.

The training thread only appends and writes one attribute; it takes no lock, wakes nobody and waits for nothing.
"""

from __future__ import annotations

from collections import deque

from .decode import footprint
from .records import Record, StepRecord

MAX_RECORDS = 512
MAX_BYTES = 1024 * 1024
"""Bounds of what waits: a worker that lags must not hold the training's memory."""
MEASURED_FROM = 8
"""Up to this length a queue of the largest records stays under MAX_BYTES, so nothing is measured."""


class RecordQueue:
    """Append on one thread, take on another. `dropped` counts step records that found it full."""

    def __init__(self) -> None:
        self.dropped = 0
        self.activity = "other"
        """What the training thread is doing: `step`, `data_wait` or `other`."""
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def put_step(self, record: StepRecord) -> None:
        """Append a step record, or drop and count it when the queue is full."""
        waiting = len(self._records)
        # The records of a train cell are alike, so this one's size tells that of all that wait.
        if waiting >= MEASURED_FROM and (
            waiting >= MAX_RECORDS or (waiting + 1) * footprint(record.outputs) > MAX_BYTES
        ):
            self.dropped += 1
            return
        self._records.append(record)

    def put(self, record: Record) -> None:
        """Append a record that is rare and must not be lost: a begin, an end, a change of phase."""
        self._records.append(record)

    def take(self, most: int) -> list[Record]:
        """The oldest records, at most `most`."""
        records = self._records
        return [records.popleft() for _ in range(min(most, len(records)))]

    def clear(self) -> None:
        """Let go of everything, tensors above all (in a forked child)."""
        self._records.clear()
