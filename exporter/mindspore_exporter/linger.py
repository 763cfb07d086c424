"""The wait for the last scrape: a process that ends takes its page along, and the final state is on it.

The wait is at interpreter exit, after the final saves of other callbacks, for finished and failed trainings alike. It
ends when every scraper seen in the last 5 minutes has fetched the final page, and at a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

RECENT_SECONDS = 300.0
"""A scraper not seen for longer has gone: Prometheus gives up series after the same 5 minutes."""
LEAST_SECONDS = 20.0
MOST_SECONDS = 90.0
INTERVALS = 2.5
"""One interval is the usual wait; the rest covers a scrape that failed."""


class Scraper(Protocol):
    """Whoever fetches the page: when it last did (`time.monotonic()` seconds) and how often it does."""

    @property
    def last_seen(self) -> float: ...

    @property
    def interval(self) -> float | None: ...


class Lingering(Protocol):
    """Something that waits for its last scrape at interpreter exit, bounded by itself."""

    def linger(self) -> None: ...


def linger_limit(configured: float | None, scrapers: Sequence[Scraper]) -> float:
    """Longest wait in seconds: `configured`, else 2.5 times the longest scrape interval seen, 20 to 90.

    0 where nobody has scraped in the last 5 minutes: there is nobody to wait for. A scraper seen once has no interval
    yet and counts for the least wait.
    """
    now = time.monotonic()
    recent = [scraper for scraper in scrapers if now - scraper.last_seen <= RECENT_SECONDS]
    if not recent:
        return 0.0
    if configured is not None:
        return configured
    longest = max(scraper.interval or 0.0 for scraper in recent)
    return min(MOST_SECONDS, max(LEAST_SECONDS, INTERVALS * longest))


def wait_for_last_scrape(
    unserved: Callable[[], Sequence[object]],
    limit: float,
    *,
    poll: float = 0.1,
    wake: threading.Event | None = None,
) -> bool:
    """Wait until `unserved` is empty: True. False after `limit` seconds, when `wake` is set, and after Ctrl-C.

    `unserved` gives the scrapers that have not fetched the final page; it is asked every `poll` seconds.
    """
    waker = wake if wake is not None else threading.Event()
    deadline = time.monotonic() + limit
    said = False
    try:
        while unserved():
            remaining = deadline - time.monotonic()
            if remaining <= 0 or waker.is_set():
                return False
            if not said:
                said = True
                log.warning("exporter: waiting at most %.0f s for the last scrape; Ctrl-C ends it", limit)
            waker.wait(min(poll, remaining))
    except KeyboardInterrupt:
        log.warning("exporter: the wait for the last scrape was interrupted")
        return False
    return True


class ExitLinger:
    """Lets everything added to it linger at interpreter exit; the process's exit code stays.

    Never in a forked child, and never raises. `atexit` runs what was registered last first: the hooks that MindSpore
    registers when it is imported come after the wait.
    """

    def __init__(self) -> None:
        self._members: list[Lingering] = []
        self._pid: int | None = None

    def add(self, member: Lingering) -> None:
        """Let `member` linger at interpreter exit."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._members.clear()
            atexit.unregister(self._run)
            atexit.register(self._run)
        if member not in self._members:
            self._members.append(member)

    def discard(self, member: Lingering) -> None:
        """Forget `member`, known or not."""
        with contextlib.suppress(ValueError):
            self._members.remove(member)

    def _run(self) -> None:
        if self._pid != os.getpid():
            return
        _let_ctrl_c_interrupt()
        for member in list(self._members):
            try:
                member.linger()
            except KeyboardInterrupt:
                log.warning("exporter: the end of the exporter was interrupted")
            except Exception:
                log.exception("exporter: error at the exit of the interpreter")


def _let_ctrl_c_interrupt() -> None:
    """MindSpore's SIGINT handler ends the process by SIGTERM; from here on it has no step left to protect."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.default_int_handler)
