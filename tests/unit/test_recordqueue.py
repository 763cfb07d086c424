"""Specification of `recordqueue.py`: bounded, and what must not be lost is not."""

from __future__ import annotations

import numpy as np

from mindspore_exporter.decode import retain
from mindspore_exporter.recordqueue import MAX_RECORDS, RecordQueue
from mindspore_exporter.records import RunEnded
from unit.steps import step


def test_records_come_out_in_order() -> None:
    queue = RecordQueue()
    for number in range(5):
        queue.put_step(step(number))
    assert [record.step for record in queue.take(3)] == [0, 1, 2]  # type: ignore[union-attr]
    assert [record.step for record in queue.take(9)] == [3, 4]  # type: ignore[union-attr]


def test_a_full_queue_drops_steps_and_counts_them() -> None:
    queue = RecordQueue()
    for number in range(MAX_RECORDS + 7):
        queue.put_step(step(number))
    assert (len(queue), queue.dropped) == (MAX_RECORDS, 7)


def test_a_full_queue_still_takes_the_end_of_the_run() -> None:
    queue = RecordQueue()
    for number in range(MAX_RECORDS + 1):
        queue.put_step(step(number))
    queue.put(RunEnded(1.0, 1.0, "finished", "finished"))
    assert isinstance(queue.take(MAX_RECORDS + 1)[-1], RunEnded)


def test_large_outputs_are_dropped_before_they_hold_a_mebibyte() -> None:
    queue = RecordQueue()
    for number in range(200):
        queue.put_step(step(number, outputs=retain(tuple(np.zeros(1024) for _ in range(8)))))
    held = sum(array.nbytes for record in queue.take(200) for array in record.outputs)  # type: ignore[union-attr]
    assert held <= 1024 * 1024
    assert queue.dropped > 0


def test_a_queue_that_was_emptied_takes_large_outputs_again() -> None:
    queue = RecordQueue()
    for _ in range(2):
        before = queue.dropped
        for number in range(10):
            queue.put_step(step(number, outputs=retain(tuple(np.zeros(1024) for _ in range(8)))))
        assert queue.dropped == before
        queue.take(10)


def test_nothing_is_held_after_clear() -> None:
    queue = RecordQueue()
    queue.put_step(step(1))
    queue.clear()
    assert len(queue) == 0
