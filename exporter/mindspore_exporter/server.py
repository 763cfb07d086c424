"""The embedded HTTP endpoint: `/metrics`, `/-/healthy`, `/-/ready` and a landing page.

One thread accepts, one renders, a bounded pool serves one connection a thread. Whoever waits for a client (its handshake,
its request, its reading) waits for a limited time and is the first to go when connections run out; nobody holds a lock
meanwhile. The pool's first threads are made at the start: at interpreter exit, when the last scrape is awaited, Python
(3.12 and newer) makes no more. What is served is what the `render` function returns: nothing here touches training.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gzip
import html
import io
import ipaddress
import logging
import math
import os
import queue
import select
import socket
import ssl
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS

from . import metrics
from .errors import EndpointError
from .webconfig import Verdict, WebConfig, WebConfigFile

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

PROFILES = ("full", "lean")
PLAIN = "text/plain; charset=utf-8"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

PAGE_SECONDS = 1.0
"""How long a rendered page is served to everybody who asks for the same one."""
MAX_PAGES = 32
"""Different pages (format, profile, groups) that are kept."""
MAX_RENDERS = 32
"""Renders a second: asking for ever different groups must not take training's CPU."""
GZIP_LEVEL = 1
"""Level 6 takes three times the CPU for a page smaller by a tenth."""

MAX_REQUESTS = 16
"""Requests for the page that wait for their render at the same time; one more gets 503."""
MAX_CONNECTIONS = 64
BASE_THREADS = 4
"""Threads that exist from the start; the others come with connections and go when idle."""
IDLE_THREAD_SECONDS = 30.0
BACKLOG = 64

HANDSHAKE_SECONDS = 5.0
HEAD_SECONDS = 5.0
"""For the whole head of a request, from its first byte; and for the first byte of a new connection."""
IDLE_SECONDS = 150.0
"""For the next request of a kept-alive connection: twice the longest usual scrape interval and a little."""
WRITE_SECONDS = 10.0
"""For a client to take the whole response."""
DRAIN_SECONDS = 1.0
STOP_SECONDS = 5.0
MAX_LINE_BYTES = 8 * 1024
MAX_HEAD_BYTES = 32 * 1024
MAX_BODY_BYTES = 64 * 1024
"""No request needs a body: it is thrown away up to here, and refused above."""

TIMEOUT_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"
TIMEOUT_MARGIN = 0.5
DEFAULT_TIMEOUT = 10.0
MAX_TIMEOUT = 120.0

MAX_SCRAPERS = 64
LOG_SECONDS = 60.0
"""Between two log lines about the same kind of fault."""


@dataclass(frozen=True)
class PageRequest:
    """Which page is wanted. `groups` empty: all."""

    openmetrics: bool
    profile: str
    groups: frozenset[str]


@dataclass(frozen=True)
class Health:
    """What `/-/ready` says; `reason` is shown when not ready."""

    ready: bool
    reason: str


@dataclass(frozen=True)
class Scraper:
    """A client that scrapes (it announces its timeout, as Prometheus and vmagent do).

    `last_seen`: `time.monotonic()` seconds of its last request; `interval`: the longest time between two of its
    requests, seconds, None before the second.
    """

    key: str
    last_seen: float
    interval: float | None


class MetricsServer:
    """The endpoint. `start` opens it, `stop` closes it without a trace; both may be repeated.

    `render` makes the page (in the endpoint's render thread, at most once a second for each PageRequest); `health`
    answers `/-/ready`; `scraped("ok" | "error")` is called after each request for `/metrics`. What they raise never
    reaches a client. Thread-safe.
    """

    def __init__(
        self,
        render: Callable[[PageRequest], bytes],
        *,
        health: Callable[[], Health],
        default_profile: str = "full",
        title: str = "",
        web_config: Path | None = None,
        scraped: Callable[[str], None] | None = None,
    ) -> None:
        self._site = _Site(render, health, default_profile, title, scraped)
        self._web_config = web_config
        self._life = threading.Lock()
        self._scrapers = _Scrapers()
        self._running: _Running | None = None

    def start(self, host: str, port: int, *, probe: int = 0) -> int:
        """Listen on `host` and the first free port of `port` .. `port + probe`; `port` 0 lets the system choose.

        Returns the port. Everything that can fail does so here, in the caller's thread: raises EndpointError when no
        port can be had or the endpoint is open already, ConfigError for a web configuration that cannot be used.
        """
        with self._life:
            if self._running is not None:
                raise EndpointError(f"the endpoint is open already, at {self.address} port {self.port}")
            web = None if self._web_config is None else WebConfigFile(self._web_config)
            listener = _listen(host, port, probe)
            try:
                self._running = _Running(listener, host, web, self._site, self._scrapers)
            except RuntimeError as error:  # no thread can be made
                listener.close()
                raise EndpointError(f"cannot serve on {host} port {port}: {error}") from None
            if port not in (0, self._running.port):
                log.warning(
                    "exporter: port %d of %s is taken, the endpoint is at port %d", port, host, self._running.port
                )
            return self._running.port

    @property
    def port(self) -> int | None:
        """The port really bound; None while the endpoint is closed."""
        running = self._running
        return None if running is None else running.port

    @property
    def address(self) -> str | None:
        """The address listened on; None while the endpoint is closed."""
        running = self._running
        return None if running is None else running.host

    @property
    def authenticated(self) -> bool:
        """Whether clients have to prove who they are."""
        running = self._running
        return running is not None and running.web().authenticated

    @property
    def tls(self) -> bool:
        """Whether the endpoint speaks HTTPS."""
        running = self._running
        return running is not None and running.web().tls is not None

    def invalidate(self) -> None:
        """Let no request that arrives from now on get a page whose render began before."""
        running = self._running
        if running is not None:
            running.pages.invalidate()

    def scrapers(self) -> tuple[Scraper, ...]:
        """The last 64 scrapers, the one seen last at the end."""
        return self._scrapers.all()

    def unserved_since(self, moment: float, within: float = 300.0) -> tuple[Scraper, ...]:
        """Scrapers seen in the last `within` seconds that have not received a whole page rendered after `moment`
        (`time.monotonic()` seconds)."""
        return self._scrapers.unserved_since(moment, within)

    def stop(self) -> None:
        """Close the endpoint and all connections and wait for the threads. Idempotent."""
        with self._life:
            running, self._running = self._running, None
            if running is not None:
                running.stop()

    def abandon_in_child(self) -> None:
        """In a forked child: close the descriptors inherited from the parent, whose endpoint stays open.

        Touches no lock, since a thread that does not exist here may have held it. Afterwards `stop` does nothing.
        """
        running, self._running = self._running, None
        self._life = threading.Lock()
        self._scrapers = _Scrapers()
        if running is not None:
            running.abandon()


def _listen(host: str, port: int, probe: int) -> socket.socket:
    last = port if port == 0 else min(port + probe, 65535)
    where = f"{host} port {port}" if last == port else f"{host} ports {port} to {last}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise EndpointError(f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}") from None
    for candidate in range(port, last + 1):
        listener = socket.socket(family, kind, protocol)
        try:
            # A restarted rank binds at once, whatever is left of the connections of the one before.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind((address[0], candidate, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE and candidate < last:
                continue
            raise EndpointError(f"cannot listen on {where}: {error.strerror}") from None
        return listener
    raise EndpointError(f"cannot listen on {where}: allowed are ports 0 to 65535")


@dataclass(frozen=True)
class _Site:
    """What the endpoint says and to whom it tells that it did."""

    render: Callable[[PageRequest], bytes]
    health: Callable[[], Health]
    default_profile: str
    title: str
    scraped: Callable[[str], None] | None


class _Running:
    """An open endpoint: its listening socket and its threads."""

    def __init__(
        self,
        listener: socket.socket,
        host: str,
        web: WebConfigFile | None,
        site: _Site,
        scrapers: _Scrapers,
    ) -> None:
        self.host = host
        self.port: int = listener.getsockname()[1]
        self.site = site
        self.scrapers = scrapers
        self.slots = threading.BoundedSemaphore(MAX_REQUESTS)
        self.faults = _Faults()
        self._web = web
        self._listener = listener
        self._stopping = threading.Event()
        self.pages = _Pages(site.render, self.faults)
        self._pool = _Pool(self._serve)
        self._acceptor = threading.Thread(target=self._accept, name="mindspore-exporter-http-accept", daemon=True)
        try:
            self.pages.start()
            self._pool.start()
            self._acceptor.start()
        except RuntimeError:
            self._end_threads()
            raise

    def web(self) -> WebConfig:
        """The web configuration in force."""
        return WebConfig() if self._web is None else self._web.current()

    def refusal(self, authorization: str | None, client: str, deadline: float) -> _Answer | None:
        """The answer to somebody who is not let in; None when he is."""
        users = self.web().users
        if self._web is None or not users:
            return None
        verdict = self._web.passwords.check(users, authorization, client, deadline)
        if verdict is Verdict.BUSY:
            return _unavailable("too many passwords are being checked", retry_after=2)
        if verdict is Verdict.REFUSED:
            return replace(_plain(HTTPStatus.UNAUTHORIZED), headers={"WWW-Authenticate": 'Basic realm="metrics"'})
        return None

    def stop(self) -> None:
        """Afterwards no socket and no thread is left (except a render that does not return)."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which closing would not
        self._end_threads()
        self._listener.close()

    def _end_threads(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        if self._web is not None:
            self._web.passwords.stop()
        self._pool.close()
        self.pages.close()
        alive = [thread for thread in (self._acceptor, *self.pages.threads(), *self._pool.threads()) if thread.ident]
        for thread in alive:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread.name for thread in alive if thread.is_alive()]
        if stuck:
            log.warning("exporter: these threads did not end in %.0f s: %s", STOP_SECONDS, ", ".join(stuck))

    def abandon(self) -> None:
        """In a forked child: give the descriptors back, without a word to the clients and without a lock."""
        _give_back(self._listener)
        self._pool.abandon()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, address = self._listener.accept()
            except OSError as error:
                if error.errno != errno.ECONNABORTED and not self._stopping.is_set():
                    self.faults.report("accept", "exporter: no connection can be accepted: %s", error.strerror)
                    self._stopping.wait(0.2)  # without descriptors the connection stays in the backlog: no busy loop
                continue
            try:
                admitted = self._pool.admit(_Connection(client, _plain_address(address[0])))
            except Exception:  # this thread must outlive every client
                self.faults.report("admit", "exporter: a connection failed", traceback=True)
                admitted = False
            if not admitted:
                client.close()

    def _serve(self, connection: _Connection) -> None:
        """In a thread of the pool: everything between a client's connection and its end."""
        try:
            web = self.web()
            if web.tls is not None and not self._secured(connection, web):
                return
            connection.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Handler(connection, self).handle()
            connection.say_goodbye()
        except OSError as error:
            log.debug("connection of %s ended: %s", connection.host, error)
        except Exception:
            self.faults.report("serve", "exporter: a request failed", traceback=True)

    def _secured(self, connection: _Connection, web: WebConfig) -> bool:
        """Make the TLS handshake; whether the client may stay."""
        assert web.tls is not None
        try:
            client = self._pool.wrap(connection, web.tls)
            connection.patiently(client.do_handshake, select.POLLIN, time.monotonic() + HANDSHAKE_SECONDS)
        except ValueError as error:  # the client is gone already
            log.debug("connection of %s ended: %s", connection.host, error)
            return False
        return web.admits(client)


def _plain_address(host: str) -> str:
    """An IPv4 client of a socket for both families has an IPv6 address that holds its own."""
    mapped = ipaddress.IPv6Address(host).ipv4_mapped if host.startswith("::ffff:") else None
    return host if mapped is None else str(mapped)


def _give_back(owned: socket.socket) -> None:
    with contextlib.suppress(OSError):
        os.close(owned.detach())


class _Faults:
    """Logs each kind of fault once a minute."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}

    def report(self, kind: str, message: str, *arguments: object, traceback: bool = False) -> None:
        """Log now, or leave it be. `kind` comes from a closed set."""
        now = time.monotonic()
        if now >= self._next.get(kind, 0.0):
            self._next[kind] = now + LOG_SECONDS
            log.error(message, *arguments, exc_info=traceback)


# --- pages --------------------------------------------------------------------------------------------------------


class _LateError(Exception):
    """The page was not there by the deadline."""


class _RenderError(Exception):
    """The page could not be rendered."""


class _BusyError(Exception):
    """Too many renders."""


class _Page:
    """A rendered page. `began_at`: when its render began (monotonic seconds); all older state is on it."""

    def __init__(self, text: bytes, began_at: float) -> None:
        self.text = text
        self.began_at = began_at
        self._lock = threading.Lock()
        self._gzipped: bytes | None = None

    def gzipped(self) -> bytes:
        """The page compressed, once for all who ask."""
        with self._lock:
            if self._gzipped is None:
                self._gzipped = gzip.compress(self.text, GZIP_LEVEL, mtime=0)
            return self._gzipped


class _Flight:
    """One render, wanted, going on or done; without a page when it failed."""

    def __init__(self, request: PageRequest, generation: int) -> None:
        self.request = request
        self.generation = generation
        self.began_at = 0.0
        self.page: _Page | None = None
        self.done = threading.Event()

    @property
    def stale(self) -> bool:
        return self.done.is_set() and time.monotonic() - self.began_at >= PAGE_SECONDS


class _Pages:
    """Renders in one thread, each page at most once a second, however many ask for it.

    A thread of its own, so that a render that hangs costs a request no more than its deadline.
    """

    def __init__(self, render: Callable[[PageRequest], bytes], faults: _Faults) -> None:
        self._render = render
        self._faults = faults
        self._lock = threading.Lock()
        self._flights: OrderedDict[PageRequest, _Flight] = OrderedDict()
        self._wanted_at: deque[float] = deque(maxlen=MAX_RENDERS)
        self._generation = 0
        self._closed = False
        self._wanted: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mindspore-exporter-http-render", daemon=True)

    def start(self) -> None:
        """Start the render thread. Raises RuntimeError when there can be none."""
        self._thread.start()

    def threads(self) -> tuple[threading.Thread, ...]:
        """The render thread."""
        return (self._thread,)

    def page(self, request: PageRequest, deadline: float) -> _Page:
        """The page, at most a second old. Raises _LateError at `deadline`, _RenderError, _BusyError."""
        flight = self._join(request)
        if not flight.done.wait(max(0.0, deadline - time.monotonic())):
            raise _LateError
        if flight.page is None:
            raise _RenderError
        return flight.page

    def _join(self, request: PageRequest) -> _Flight:
        with self._lock:
            flight = self._flights.get(request)
            if flight is not None and flight.generation == self._generation and not flight.stale:
                return flight
            now = time.monotonic()
            if self._closed or (len(self._wanted_at) == MAX_RENDERS and now - self._wanted_at[0] < 1.0):
                raise _BusyError
            self._wanted_at.append(now)
            flight = self._flights[request] = _Flight(request, self._generation)
            self._flights.move_to_end(request)
            if len(self._flights) > MAX_PAGES:
                self._flights.popitem(last=False)
            self._wanted.put(flight)
            return flight

    def invalidate(self) -> None:
        """Let later requests join no flight that is there now."""
        with self._lock:
            self._generation += 1

    def close(self) -> None:
        """End the thread and let everybody who waits go."""
        with self._lock:
            self._closed = True
            flights = list(self._flights.values())
        self._wanted.put(None)
        for flight in flights:
            flight.done.set()

    def _run(self) -> None:
        while (flight := self._wanted.get()) is not None:
            if self._closed:
                continue
            flight.began_at = time.monotonic()
            try:
                flight.page = _Page(self._render(flight.request), flight.began_at)
            except Exception:
                self._faults.report("render", "exporter: the page cannot be rendered", traceback=True)
            flight.done.set()


# --- scrapers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    scraper: Scraper
    page_began_at: float = -math.inf


class _Scrapers:
    """Who scrapes, how often, and from when the last page is that each received whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def saw(self, key: str, at: float) -> None:
        """A scrape arrived."""
        with self._lock:
            before = self._seen.get(key)
            if before is None:
                self._seen[key] = _Seen(Scraper(key, at, None))
            else:
                interval = max(at - before.scraper.last_seen, before.scraper.interval or 0.0)
                self._seen[key] = replace(before, scraper=Scraper(key, at, interval))
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_SCRAPERS:
                self._seen.popitem(last=False)

    def served(self, key: str, page: _Page) -> None:
        """A scraper has received a whole page."""
        with self._lock:
            before = self._seen.get(key)
            if before is not None and page.began_at > before.page_began_at:
                self._seen[key] = replace(before, page_began_at=page.began_at)

    def all(self) -> tuple[Scraper, ...]:
        with self._lock:
            return tuple(seen.scraper for seen in self._seen.values())

    def unserved_since(self, moment: float, within: float) -> tuple[Scraper, ...]:
        earliest = time.monotonic() - within
        with self._lock:
            return tuple(
                seen.scraper
                for seen in self._seen.values()
                if seen.scraper.last_seen >= earliest and seen.page_began_at < moment
            )


# --- connections --------------------------------------------------------------------------------------------------


class _HeadTooLargeError(Exception):
    """A request's head is larger than any request needs."""


class _Connection(io.RawIOBase):
    """One client. Reading keeps to a deadline and a number of bytes for the whole of what is read, writing to a
    deadline for the whole response: a client that sends or takes a byte now and then does not get around them.

    The socket never blocks: each call on one with a time limit gives up the interpreter lock three times, which costs
    up to 5 ms each while training runs Python.

    `waits_since`: since when the server waits for this client (monotonic seconds), None while it works for it.
    """

    def __init__(self, client: socket.socket, host: str) -> None:
        self.client = client
        self.host = host
        self.waits_since: float | None = None
        self.evicted = False
        self._deadline = 0.0
        self._bytes_left = 0
        client.setblocking(False)

    def limit_reading(self, seconds: float, size: int) -> None:
        """What follows must be read within this time and size."""
        self._deadline = time.monotonic() + seconds
        self._bytes_left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._bytes_left)
        if size <= 0:
            raise _HeadTooLargeError
        count = self.patiently(lambda: self.client.recv_into(buffer, size), select.POLLIN, self._deadline)
        self._bytes_left -= count
        return count

    def send(self, response: bytes) -> None:
        """Send all of it. Raises OSError when the client does not take it in time."""
        deadline = time.monotonic() + WRITE_SECONDS
        self.waits_since = time.monotonic()
        sent = 0
        while sent < len(response):
            chunk = memoryview(response)[sent : sent + 65536]
            sent += self.patiently(functools.partial(self.client.send, chunk), select.POLLOUT, deadline)
        self.waits_since = None

    def patiently(self, attempt: Callable[[], _Result], awaits: int, deadline: float) -> _Result:
        """What `attempt` returns as soon as the client lets it; raises TimeoutError at the deadline.

        `awaits`: POLLIN or POLLOUT, what the attempt needs; TLS may need the other one for its own messages.
        """
        while True:
            try:
                return attempt()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except BlockingIOError:
                events = awaits
            poll = select.poll()
            poll.register(self.client, events)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError("the client was too slow")

    def say_goodbye(self) -> None:
        """End after a response: what the client is still sending is thrown away, within limits, since closing on it
        would reset the connection and take the response from the client."""
        self.waits_since = time.monotonic()
        deadline = self.waits_since + DRAIN_SECONDS
        if isinstance(self.client, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                self.client.unwrap()
        # The methods of the plain socket, also under TLS: nobody reads what comes.
        socket.socket.shutdown(self.client, socket.SHUT_WR)
        left = MAX_BODY_BYTES
        while left > 0:
            thrown_away = self.patiently(lambda: socket.socket.recv(self.client, 65536), select.POLLIN, deadline)
            if not thrown_away:
                return
            left -= len(thrown_away)

    def hang_up(self) -> None:
        """Wake the thread that serves this connection out of whatever it waits for the client with."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.client, socket.SHUT_RDWR)


class _Pool:
    """The open connections and the threads that serve them, one a connection, both bounded.

    When there is no room, the connection goes for whose client the server waits longest, among those of the address
    that has most: silent clients cannot keep scrapers out.
    """

    def __init__(self, serve: Callable[[_Connection], None]) -> None:
        self._serve = serve
        self._changed = threading.Condition()
        self._open: set[_Connection] = set()
        self._threads: list[threading.Thread] = []
        self._number = 0
        self._closed = False
        self._admitted: queue.SimpleQueue[_Connection | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the first threads. Raises RuntimeError when there can be none."""
        with self._changed:
            for _ in range(BASE_THREADS):
                self._grow()

    def threads(self) -> tuple[threading.Thread, ...]:
        """The threads that have not ended by themselves."""
        with self._changed:
            return tuple(self._threads)

    def admit(self, connection: _Connection) -> bool:
        """Let a thread serve it. False when there is no room: the caller closes it."""
        with self._changed:
            if not self._has_room():
                self._evict()
                self._changed.wait_for(self._has_room, timeout=1.0)
            if self._closed or not self._has_room():
                return False
            self._open.add(connection)
            self._admitted.put(connection)
            return True

    def _has_room(self) -> bool:
        """Whether a thread is free for one more connection, made if need be."""
        if self._closed or len(self._open) < len(self._threads):
            return True
        if len(self._threads) >= MAX_CONNECTIONS:
            return False
        try:
            self._grow()
        except RuntimeError:
            return False
        return True

    def _grow(self) -> None:
        self._number += 1
        name = f"mindspore-exporter-http-{self._number}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _evict(self) -> None:
        crowd = Counter(connection.host for connection in self._open)
        waiting = [
            (-crowd[connection.host], since, connection)
            for connection in self._open
            if (since := connection.waits_since) is not None and not connection.evicted
        ]
        if waiting:
            victim = min(waiting, key=lambda row: row[:2])[2]
            victim.evicted = True
            victim.hang_up()

    def wrap(self, connection: _Connection, context: ssl.SSLContext) -> ssl.SSLSocket:
        """Put TLS on the connection, without its handshake. Under the lock: whoever hangs up must find its socket."""
        connection.waits_since = time.monotonic()
        with self._changed:
            secured = context.wrap_socket(connection.client, server_side=True, do_handshake_on_connect=False)
            connection.client = secured
        return secured

    def close(self) -> None:
        """Hang up on all clients and end all threads."""
        with self._changed:
            self._closed = True
            for connection in self._open:
                connection.hang_up()
            for _ in self._threads:
                self._admitted.put(None)
            self._changed.notify_all()

    def abandon(self) -> None:
        """In a forked child: give the descriptors back."""
        for connection in tuple(self._open):
            _give_back(connection.client)

    def _run(self) -> None:
        while True:
            try:
                connection = self._admitted.get(timeout=IDLE_THREAD_SECONDS)
            except queue.Empty:
                if self._superfluous():
                    return
                continue
            if connection is None:
                return
            try:
                self._serve(connection)
            finally:
                self._release(connection)

    def _superfluous(self) -> bool:
        with self._changed:
            if self._closed or len(self._threads) <= max(BASE_THREADS, len(self._open)):
                return False
            self._threads.remove(threading.current_thread())
            return True

    def _release(self, connection: _Connection) -> None:
        # Under the lock: nobody may hang up on a descriptor that is somebody else's by then.
        with self._changed:
            self._open.discard(connection)
            connection.client.close()
            self._changed.notify_all()


# --- requests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: Mapping[str, str] | None = None
    page: _Page | None = None


def _plain(status: HTTPStatus, text: str = "") -> _Answer:
    return _Answer(status, f"{text or status.phrase}\n".encode())


def _unavailable(text: str, retry_after: int = 1) -> _Answer:
    answer = _plain(HTTPStatus.SERVICE_UNAVAILABLE, text)
    return replace(answer, headers={"Retry-After": str(retry_after)})


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection: the standard library reads them, the deadlines are the connection's."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    """Of a request that does not say: the standard library's 0.9 has no status line to refuse it with."""

    def __init__(self, connection: _Connection, running: _Running) -> None:
        # Not the base's: it makes files of the socket, whose time limits are for each call, and handles at once.
        self._connection = connection
        self._running = running
        self.rfile = self._reader = io.BufferedReader(connection)
        self.wfile = self._response = io.BytesIO()
        self._first = True

    def handle_one_request(self) -> None:
        self.close_connection = True
        self.command, self.requestline, self.request_version = "", "", self.default_request_version
        connection = self._connection
        connection.waits_since = time.monotonic()
        connection.limit_reading(HEAD_SECONDS if self._first else IDLE_SECONDS, MAX_HEAD_BYTES)
        self._first = False
        if not self._reader.peek(1):
            return
        arrived_at = time.monotonic()
        connection.limit_reading(HEAD_SECONDS, MAX_HEAD_BYTES)
        try:
            self.raw_requestline = self.rfile.readline(MAX_LINE_BYTES + 1)
            if len(self.raw_requestline) > MAX_LINE_BYTES:
                self._send(_plain(HTTPStatus.REQUEST_URI_TOO_LONG))
                return
            if not self.parse_request():
                return
        except _HeadTooLargeError:
            self.close_connection = True
            self._send(_plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
            return
        connection.waits_since = None
        self._respond(arrived_at)

    def _respond(self, arrived_at: float) -> None:
        try:
            path, query = urlsplit(self.path)[2:4]
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        length = self.headers.get("Content-Length", "0")
        has_body = length != "0" or "Transfer-Encoding" in self.headers
        if has_body:
            self.close_connection = True
        deadline = arrived_at + _time_limit(self.headers.get(TIMEOUT_HEADER))
        result = "error"
        try:
            answer = self._running.refusal(self.headers.get("Authorization"), self._connection.host, deadline)
            if answer is None and not _is_small(length):
                answer = _plain(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            if answer is None and self.command not in ("GET", "HEAD"):
                answer = replace(_plain(HTTPStatus.METHOD_NOT_ALLOWED), headers={"Allow": "GET, HEAD"})
            if answer is None and path == "/metrics":
                result = self._serve_metrics(query, arrived_at, deadline)
            else:
                self._send(answer or self._look_up(path))
        finally:
            if path == "/metrics":
                self._count(result)

    def _serve_metrics(self, query: str, arrived_at: float, deadline: float) -> str:
        """Answer a scrape; the result that is counted."""
        scraper = self._scraper()
        if scraper is not None:
            self._running.scrapers.saw(scraper, arrived_at)
        answer = self._metrics(query, deadline)
        self._send(answer)
        if answer.page is None:
            return "error"
        if scraper is not None:
            self._running.scrapers.served(scraper, answer.page)
        return "ok"

    def _scraper(self) -> str | None:
        if self.command != "GET" or TIMEOUT_HEADER not in self.headers:
            return None
        return f"{self._connection.host} {self.headers.get('User-Agent', '')[:200]}"

    def _metrics(self, query: str, deadline: float) -> _Answer:
        try:
            request = _page_request(query, self.headers.get("Accept"), self._running.site.default_profile)
        except _QueryError as error:
            return _plain(HTTPStatus.BAD_REQUEST, str(error))
        if not self._running.slots.acquire(blocking=False):
            return _unavailable(f"{MAX_REQUESTS} requests are being served already")
        try:
            page = self._running.pages.page(request, deadline)
            compressed = _takes_gzip(self.headers.get("Accept-Encoding"))
            body = page.gzipped() if compressed else page.text
        except _LateError:
            return _unavailable("the page was not ready within the time limit of the scrape")
        except _BusyError:
            return _unavailable("too many different pages are asked for")
        except _RenderError:
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "the page cannot be rendered, the log of the run says why")
        finally:
            self._running.slots.release()
        headers = {"Vary": "Accept, Accept-Encoding", "Cache-Control": "no-store"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return _Answer(HTTPStatus.OK, body, OPENMETRICS if request.openmetrics else PROMETHEUS_TEXT, headers, page)

    def _look_up(self, path: str) -> _Answer:
        if path == "/-/healthy":
            return _plain(HTTPStatus.OK)
        if path == "/-/ready":
            return self._readiness()
        if path == "/":
            return _landing(self._running.site.title)
        return _plain(HTTPStatus.NOT_FOUND, "Not Found; there are /metrics, /-/healthy, /-/ready and /")

    def _readiness(self) -> _Answer:
        try:
            health = self._running.site.health()
        except Exception:
            self._running.faults.report("health", "exporter: the health cannot be told", traceback=True)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        return _plain(HTTPStatus.OK) if health.ready else _plain(HTTPStatus.SERVICE_UNAVAILABLE, health.reason)

    def _count(self, result: str) -> None:
        scraped = self._running.site.scraped
        try:
            if scraped is not None:
                scraped(result)
        except Exception:
            self._running.faults.report("scraped", "exporter: a scrape cannot be counted", traceback=True)

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(answer.body)),
            "X-Content-Type-Options": "nosniff",
            **(answer.headers or {}),
            **self._running.web().headers,
        }
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        response = self._response.getvalue()
        self._response.seek(0)
        self._response.truncate()
        self._connection.send(response)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by the standard library for a request that it cannot read; its own page repeats the request."""
        self.close_connection = True
        self._send(_plain(HTTPStatus(code)))

    def handle_expect_100(self) -> bool:
        """No body is wanted: the final answer comes at once."""
        return True

    def version_string(self) -> str:
        """The `Server` header: no versions for those who look for old ones."""
        return "mindspore-exporter"

    def log_message(self, format: str, *arguments: Any) -> None:
        """No access log: it would fill the log of the training."""


def _is_small(content_length: str) -> bool:
    return content_length.isdecimal() and len(content_length) < 10 and int(content_length) <= MAX_BODY_BYTES


def _time_limit(header: str | None) -> float:
    """Seconds in which a request must be answered: what the scrape announces, less the time of the way back."""
    try:
        announced = float(header or "")
    except ValueError:
        return DEFAULT_TIMEOUT
    if not (math.isfinite(announced) and announced > 0):
        return DEFAULT_TIMEOUT
    return min(max(announced - TIMEOUT_MARGIN, announced / 2), MAX_TIMEOUT)


class _QueryError(Exception):
    """A query that asks for what does not exist; the text names it and what does."""


def _page_request(query: str, accept: str | None, default_profile: str) -> PageRequest:
    try:
        parameters = parse_qs(query, keep_blank_values=True, max_num_fields=100)
    except ValueError:
        raise _QueryError("the query has more than 100 parameters") from None
    profiles = parameters.get("profile", [default_profile])
    groups = parameters.get("collect[]", [])
    _refuse_unknown("profile", profiles, PROFILES)
    _refuse_unknown("collect[]", groups, metrics.GROUPS)
    return PageRequest(_takes_openmetrics(accept), profiles[-1], frozenset(groups))


def _refuse_unknown(name: str, values: list[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise _QueryError(f"{name}={value[:100]!r} does not exist; allowed: {', '.join(allowed)}")


def _takes_openmetrics(accept: str | None) -> bool:
    """Whether OpenMetrics 1 is accepted, and the Prometheus text is not preferred to it (RFC 9110, 12.5.1)."""
    openmetrics = text = 0.0
    for kind, parameters in _weighed(accept):
        if kind == "application/openmetrics-text" and parameters.get("version", "1").split(".")[0] == "1":
            openmetrics = max(openmetrics, _quality(parameters))
        elif kind == "text/plain":
            text = max(text, _quality(parameters))
    return openmetrics > 0 and openmetrics >= text


def _takes_gzip(accept_encoding: str | None) -> bool:
    return any(kind in ("gzip", "x-gzip") and _quality(rest) > 0 for kind, rest in _weighed(accept_encoding))


def _weighed(header: str | None) -> list[tuple[str, dict[str, str]]]:
    """The alternatives of an `Accept...` header with their parameters, in lower case."""
    alternatives = []
    for alternative in (header or "").lower().split(","):
        kind, *rest = (part.strip() for part in alternative.split(";"))
        parameters = (part.partition("=") for part in rest)
        alternatives.append((kind, {name.strip(): value.strip().strip('"') for name, _, value in parameters}))
    return alternatives


def _quality(parameters: Mapping[str, str]) -> float:
    try:
        return float(parameters.get("q", "1"))
    except ValueError:
        return 0.0


LANDING = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;margin:3rem auto;max-width:40rem;padding:0 1rem;color-scheme:light dark}}
</style></head>
<body><h1>{title}</h1>
<ul><li><a href="metrics">Metrics</a></li><li><a href="metrics?profile=lean">Metrics, lean profile</a></li>
<li><a href="-/ready">Ready</a></li><li><a href="-/healthy">Healthy</a></li></ul></body>
</html>
"""


def _landing(title: str) -> _Answer:
    shown = html.escape(f"mindspore-exporter: {title}" if title else "mindspore-exporter")
    return _Answer(
        HTTPStatus.OK,
        LANDING.format(title=shown).encode(),
        "text/html; charset=utf-8",
        {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
    )
