"""The worker thread: polls the queue, hands the records to the pipeline, publishes.

It polls because waking a thread at each step would cost the training thread more than the whole hook. It sleeps so that
a turn finds a handful of records: what a turn costs whatever it finds is shared by them. Between a few records it offers
the interpreter lock, so that the training thread never waits for longer than those few take.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from .pipeline import Pipeline
from .recordqueue import RecordQueue

log = logging.getLogger(__name__)

BURST = 24
"""Records of one turn at most."""
OFFER_EVERY = 8
"""Records after which the interpreter lock is offered."""
SHORTEST_SLEEP = 0.004
LONGEST_SLEEP = 1.0
"""In PyNative mode a read waits, spinning, until the operators under way are issued (2 to 10 ms of CPU a turn, whatever the
turn reads), so slow trainings get few turns. Who needs an answer at once wakes the worker by `flush`."""
PUBLISH_SECONDS = 1.0
"""Time between two publications: the page is rendered once a second at most. A change of phase is published at once."""


class Worker:
    """Owns the thread. `flush` waits until all that was put before it is on the page."""

    def __init__(
        self, queue: RecordQueue, pipeline: Pipeline, hook_errors: Callable[[], int], published: Callable[[], None]
    ) -> None:
        self._queue = queue
        self._pipeline = pipeline
        self._hook_errors = hook_errors
        self._published = published
        self._inbox: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._wake = threading.Event()
        self._flushed = threading.Condition()
        self._flushes_asked = 0
        self._flushes_done = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="mindspore-exporter-worker", daemon=True)
        self._thread.start()

    def call(self, task: Callable[[], None]) -> None:
        """Let the worker run `task` between two records: the pipeline has one owner."""
        self._inbox.append(task)
        self._wake.set()

    def flush(self, limit: float) -> bool:
        """Wait until everything put so far is on the page, at most `limit` seconds. False where it is not."""
        deadline = time.monotonic() + limit
        with self._flushed:
            self._flushes_asked += 1
            asked = self._flushes_asked
            self._wake.set()
            while self._flushes_done < asked:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self.alive:
                    return False
                self._flushed.wait(min(remaining, 0.2))
        return True

    def stop(self, limit: float = 2.0) -> None:
        """End the thread after it has taken and published what is queued; waits at most `limit` seconds."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        sleep, published_at = LONGEST_SLEEP, 0.0
        while True:
            self._wake.clear()
            stopping = self._stopping
            asked, handled = self._flushes_asked, 0
            try:
                phase = self._pipeline.phases.phase
                handled = self._take()
                now = time.monotonic()
                empty = not self._queue and not self._inbox
                told = phase != self._pipeline.phases.phase or (empty and (stopping or asked > self._flushes_done))
                if told or now - published_at >= PUBLISH_SECONDS:
                    published_at = now
                    self._publish(now, handled)
            except Exception:
                self._pipeline.count_error("publish", "the worker could not publish")
                empty = not self._queue
            if empty:
                self._answer_flushes(asked)
                if stopping:
                    return
            sleep = SHORTEST_SLEEP if stopping else self._next_sleep(sleep, handled)
            self._wake.wait(sleep)

    def _take(self) -> int:
        while self._inbox:
            self._inbox.popleft()()
        records = self._queue.take(BURST)
        for number, record in enumerate(records, 1):
            self._pipeline.handle(record)
            if number % OFFER_EVERY == 0:
                time.sleep(0)
        return len(records)

    def _publish(self, now: float, handled: int) -> None:
        if not handled:
            self._pipeline.tick(now, self._queue.activity)
        self._pipeline.publish(
            time.time(), queue_length=len(self._queue), dropped=self._queue.dropped, hook_errors=self._hook_errors()
        )
        self._published()

    def _answer_flushes(self, asked: int) -> None:
        if asked > self._flushes_done:
            with self._flushed:
                self._flushes_done = asked
                self._flushed.notify_all()

    def _next_sleep(self, sleep: float, handled: int) -> float:
        """Halve the sleep while turns are full, stretch it while they are nearly empty."""
        if self._flushes_asked > self._flushes_done or len(self._queue) >= BURST:
            return SHORTEST_SLEEP
        if handled > BURST * 3 // 4:
            return max(SHORTEST_SLEEP, sleep / 2)
        if handled < BURST // 2:
            return min(LONGEST_SLEEP, sleep * 1.25)
        return sleep
