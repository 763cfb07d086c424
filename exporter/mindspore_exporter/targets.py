"""`mindspore-exporter targets DIR`: the directory of file_sd entries as a table, or as Prometheus HTTP SD.

Plain file_sd believes every file for ever. Between the directory and Prometheus this program believes only what a rank
of ours can have written: regular files named `<run>-rank<rank>.json` that nobody but their owner can write, with one
address inside the allowed networks and no label that steers the scrape. What was not refreshed for 10 minutes is
dropped and removed.

A host name counts as inside when every address it resolves to is. Answers are kept 5 minutes, and up to an hour while
the resolver fails. Prometheus resolves the name again by itself: where the directory is open to people who also control
a name server, let the entries hold IP addresses (`discovery.address`).
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import socketserver
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .discovery import (
    EXPIRY_SECONDS,
    FILE_NAME,
    MAX_BYTES,
    META_PREFIX,
    READ_FLAGS,
    SCHEMES,
    TEMPORARY_NAME,
    host_fault,
    labels_fault,
)
from .errors import ExporterError

log = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

DEFAULT_NETWORKS: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
"""Loopback, RFC 1918 and RFC 4193. Link-local is not among them: clouds answer there with credentials."""

MAX_FILES = 32_768
"""Twice the ranks that the shipped `target_limit` lets one server scrape."""
READ_SECONDS = 5.0
"""Between two readings of a directory of usual size; Prometheus itself gathers changes for 5 seconds."""
LISTING_SECONDS = 120.0
"""How long a list is served after the last good reading. Later requests get an error, on which Prometheus keeps the
targets it has; an empty or partial list would make it drop them."""
MAX_LOG_LINES = 20
"""Refused files that one reading names in the log; each is named when it becomes refused, not at every reading."""
MAX_REQUESTS = 16
REQUEST_SECONDS = 5.0

ANSWER_SECONDS = 300.0
FAILING_SECONDS = 3600.0
SLOW_SECONDS = 1.0
RETRY_SECONDS = 30.0
SLOW_RETRY_SECONDS = 600.0


class DirectoryError(ExporterError):
    """The directory of entries cannot be read."""


class _RefusedError(Exception):
    """One file is not believed; the text says why."""


@dataclass(frozen=True)
class Entry:
    """A file that is believed. `target` is `host:port`, `age` the seconds since the last refresh."""

    file: str
    run: str
    rank: int
    target: str
    age: float
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Refused:
    """A file that is not believed, and why. `age` is in seconds."""

    file: str
    reason: str
    age: float


@dataclass(frozen=True)
class Listing:
    """One reading of the directory. Only `entries` are targets.

    `expired` are whole entries of ranks that stopped refreshing; `abandoned` are the names of temporary files that an
    interrupted write left.
    """

    entries: tuple[Entry, ...] = ()
    refused: tuple[Refused, ...] = ()
    expired: tuple[Entry, ...] = ()
    abandoned: tuple[str, ...] = ()


# --- which addresses ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    addresses: tuple[Address, ...]
    good_until: float
    ask_again: float


def _resolve(host: str) -> tuple[Address, ...]:
    """Every address of a host name. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple({ipaddress.ip_address(str(information[4][0]).partition("%")[0]) for information in found})


class AllowedNetworks:
    """The addresses that may be scraped.

    A name server that does not answer must hold neither the table nor the other names up: after one slow question no
    further name is asked for a while, and the slow one for longer, so that the others get their turn.
    """

    def __init__(
        self,
        networks: Iterable[Network] = DEFAULT_NETWORKS,
        resolve: Callable[[str], tuple[Address, ...]] = _resolve,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.networks = tuple(networks)
        self._resolve = resolve
        self._clock = clock
        self._answers: dict[str, _Answer] = {}
        self._pause_until = 0.0

    def refusal(self, host: str) -> str | None:
        """Why `host` (an IP address or a name) may not be scraped, None when it may."""
        try:
            addresses: tuple[Address, ...] = (ipaddress.ip_address(host),)
        except ValueError:
            addresses = self._addresses(host)
            if not addresses:
                return f"host name {host} is not resolved"
        outside = next((address for address in addresses if not self._inside(address)), None)
        if outside is None:
            return None
        shown = host if str(outside) == host else f"{host} ({outside})"
        return f"address {shown} is outside the allowed networks {', '.join(map(str, self.networks))}"

    def _inside(self, address: Address) -> bool:
        plain = getattr(address, "ipv4_mapped", None) or address
        return any(plain in network for network in self.networks)

    def _addresses(self, host: str) -> tuple[Address, ...]:
        now = self._clock()
        known = self._answers.get(host)
        if (known is None or now >= known.ask_again) and now >= self._pause_until:
            known = self._answers[host] = self._ask(host, known, now)
            while len(self._answers) > MAX_FILES:
                del self._answers[next(iter(self._answers))]
        return known.addresses if known is not None and now < known.good_until else ()

    def _ask(self, host: str, known: _Answer | None, begin: float) -> _Answer:
        try:
            addresses = self._resolve(host)
        except (OSError, UnicodeError, ValueError):
            addresses = ()
        end = self._clock()
        slow = end - begin > SLOW_SECONDS
        if slow:
            self._pause_until = end + RETRY_SECONDS
        if addresses:
            return _Answer(addresses, end + FAILING_SECONDS, end + ANSWER_SECONDS)
        retry = end + (SLOW_RETRY_SECONDS if slow else RETRY_SECONDS)
        return _Answer(known.addresses, known.good_until, retry) if known else _Answer((), 0.0, retry)


# --- reading ------------------------------------------------------------------------------------------------------


def read_directory(directory: Path, now: float, allowed: AllowedNetworks) -> Listing:
    """Read and check every entry. Changes nothing.

    `now`: Unix time in seconds, by the clock that is compared with the files' times. Raises DirectoryError when the
    directory cannot be read or holds more than MAX_FILES files.
    """
    entries: list[Entry] = []
    refused: list[Refused] = []
    abandoned: list[str] = []
    with _opened(directory) as descriptor:
        for name in _names(directory, descriptor):
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except OSError:
                continue  # gone since it was listed: a write or a removal on its way
            age = max(0.0, now - status.st_mtime)
            if TEMPORARY_NAME.fullmatch(name):
                if age > EXPIRY_SECONDS and stat.S_ISREG(status.st_mode):
                    abandoned.append(name)
                continue
            try:
                entries.append(_read_entry(descriptor, name, now, allowed))
            except _RefusedError as error:
                refused.append(Refused(name, str(error), age))
            except FileNotFoundError:
                continue
            except OSError as error:
                refused.append(Refused(name, f"cannot be read: {error.strerror}", age))
    expired = [entry for entry in entries if entry.age > EXPIRY_SECONDS]
    current, superseded = _newest_of_each_address(entry for entry in entries if entry.age <= EXPIRY_SECONDS)
    return Listing(
        tuple(sorted(current, key=lambda entry: (entry.run, entry.rank))),
        tuple(sorted([*refused, *superseded], key=lambda file: file.file)),
        tuple(sorted(expired, key=lambda entry: (entry.run, entry.rank))),
        tuple(abandoned),
    )


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DirectoryError(f"{directory}: cannot be read: {error.strerror}") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _names(directory: Path, descriptor: int) -> list[str]:
    names = []
    try:
        with os.scandir(descriptor) as files:
            for file in files:
                if file.name.endswith((".json", ".tmp")):
                    names.append(file.name)
                if len(names) > MAX_FILES:
                    raise DirectoryError(
                        f"{directory}: has more than {MAX_FILES} files; is it the directory of entries?"
                    )
    except OSError as error:
        raise DirectoryError(f"{directory}: cannot be read: {error.strerror}") from None
    return sorted(names)


def _read_entry(directory: int, name: str, now: float, allowed: AllowedNetworks) -> Entry:
    """Read and check one file. Raises _RefusedError, OSError."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise _RefusedError("the name is not <run>-rank<rank>.json")
    data, status = _read_trusted(directory, name)
    if status.st_mtime > now + EXPIRY_SECONDS:
        raise _RefusedError(f"its time lies {status.st_mtime - now:.0f} s in the future")
    target, labels = _parse(data)
    run, rank = match["run"], match["rank"]
    said = labels.get(META_PREFIX + "run"), labels.get(META_PREFIX + "rank")
    if said != (run, rank):
        raise _RefusedError(f"it speaks of run {said[0]!a} and rank {said[1]!a}, its name of another")
    host, _ = _host_and_port(target)
    refusal = allowed.refusal(host)
    if refusal:
        raise _RefusedError(refusal)
    return Entry(name, run, int(rank), target, max(0.0, now - status.st_mtime), labels)


def _read_trusted(directory: int, name: str) -> tuple[bytes, os.stat_result]:
    """The content of a small regular file that only its owner can write, and its status. Raises _RefusedError, OSError."""
    if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        raise _RefusedError("not a regular file")  # before opening: opening a device can have effects
    try:
        descriptor = os.open(name, READ_FLAGS, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _RefusedError("not a regular file") from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _RefusedError("not a regular file")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _RefusedError(f"others than its owner can write it (mode {stat.S_IMODE(status.st_mode):04o})")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _RefusedError(f"larger than {MAX_BYTES} bytes")
    return data, status


def _parse(data: bytes) -> tuple[str, dict[str, str]]:
    """Target and labels of an entry: one group with one address. Raises _RefusedError."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _RefusedError("not JSON") from None
    if not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)):
        raise _RefusedError("not a list of one group")
    group = value[0]
    if group.keys() != {"targets", "labels"}:
        raise _RefusedError("a group has the keys targets and labels, and no others")
    targets, labels = group["targets"], group["labels"]
    if not (isinstance(targets, list) and len(targets) == 1 and isinstance(targets[0], str)):
        raise _RefusedError("targets is not a list of one address")
    if not (isinstance(labels, dict) and all(isinstance(text, str) for text in labels.values())):
        raise _RefusedError("labels is not an object of texts")
    scheme = labels.get("__scheme__", "http")
    if scheme not in SCHEMES:
        raise _RefusedError(f"label __scheme__ is {scheme[:40]!a}, allowed: {', '.join(SCHEMES)}")
    fault = labels_fault({name: text for name, text in labels.items() if name != "__scheme__"})
    if fault:
        raise _RefusedError(fault)
    return targets[0], labels


def _host_and_port(target: str) -> tuple[str, int]:
    """The parts of `host:port`, an IPv6 address in brackets. Raises _RefusedError."""
    match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:\[\]/@?#\s]+)):(?P<port>[1-9][0-9]{0,4})", target)
    if match is None or int(match["port"]) > 65535:
        raise _RefusedError(f"the target {target[:60]!a} is not host:port")
    host = match["six"] or match["host"]
    fault = host_fault(host)
    if fault:
        raise _RefusedError(f"the target's host {fault}")
    return host, int(match["port"])


def _newest_of_each_address(entries: Iterable[Entry]) -> tuple[list[Entry], list[Refused]]:
    """A port that a dead run's rank left is bound by the next one: scraping it twice would store its series twice."""
    newest: dict[str, Entry] = {}
    superseded = []
    for entry in sorted(entries, key=lambda entry: (entry.age, entry.file)):
        kept = newest.setdefault(entry.target, entry)
        if kept is not entry:
            superseded.append(Refused(entry.file, f"{kept.file} has the same address and is newer", entry.age))
    return list(newest.values()), superseded


def remove_expired(directory: Path, listing: Listing, now: float) -> tuple[str, ...]:
    """Remove the files of expired entries and interrupted writes; returns the names that are gone.

    Looks at each file's time again first: a rank that was only suspended may have refreshed its entry since. Raises
    DirectoryError when the directory cannot be opened; a file that cannot be removed stays.
    """
    names = [*(entry.file for entry in listing.expired), *listing.abandoned]
    removed = []
    if names:
        with _opened(directory) as descriptor:
            for name in names:
                with suppress(OSError):
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and now - status.st_mtime > EXPIRY_SECONDS:
                        os.unlink(name, dir_fd=descriptor)
                        removed.append(name)
    return tuple(removed)


# --- keeping a list, whatever the file system does -------------------------------------------------------------------


class DirectoryReader:
    """Reads the directory on its own thread, so that a hung file system holds that thread and no answer.

    `read` gives one listing or raises DirectoryError; `clock` counts seconds.
    """

    def __init__(self, read: Callable[[], Listing], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._stop = threading.Event()
        self._good: tuple[float, Listing] | None = None
        self._failure = "it was not read yet"
        self._refused: set[str] = set()
        # A daemon: the process must be able to end while a reading hangs in the kernel.
        self._thread = threading.Thread(target=self._run, name="targets-reader", daemon=True)

    def start(self) -> None:
        """Begin reading, again and again."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; does not wait for a reading that hangs."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(REQUEST_SECONDS)

    def current(self) -> Listing:
        """The last good listing. Raises DirectoryError when there is none younger than LISTING_SECONDS."""
        if self._good is None:
            raise DirectoryError(f"no list of targets: {self._failure}")
        read_at, listing = self._good
        age = self._clock() - read_at
        if age > LISTING_SECONDS:
            raise DirectoryError(f"the last list of targets is {age:.0f} s old: {self._failure}")
        return listing

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = self._clock()
            self.read_once()
            self._stop.wait(reading_pause(self._clock() - begin))

    def read_once(self) -> None:
        """One reading; a failed one leaves the last good listing in place."""
        begin = self._clock()
        try:
            listing = self._read()
        except Exception as error:  # whatever it is, the next reading may be good; a dead thread would be silent
            failure = str(error) if isinstance(error, DirectoryError) else f"{type(error).__name__}: {error}"
            if failure != self._failure:
                log.error("%s", failure)
            self._failure = failure
            return
        self._failure = "the last reading of the directory does not end"
        self._good = (begin, listing)
        fresh = [file for file in listing.refused if file.file not in self._refused]
        for file in fresh[:MAX_LOG_LINES]:
            log.warning("%s is refused: %s", _shown(file.file), file.reason)
        if len(fresh) > MAX_LOG_LINES:
            log.warning("%d more files are refused", len(fresh) - MAX_LOG_LINES)
        self._refused = {file.file for file in listing.refused}


def reading_pause(seconds: float) -> float:
    """Pause after a reading that took `seconds`: a tenth of the time is spent reading at most, as far as a list of
    LISTING_SECONDS bears it (16,384 entries take 1.6 s of a core)."""
    return min(LISTING_SECONDS / 4, max(READ_SECONDS, 9 * seconds))


def groups(listing: Listing) -> list[dict[str, Any]]:
    """The entries as Prometheus HTTP SD expects them: a list of groups with `targets` and `labels`."""
    return [{"targets": [entry.target], "labels": dict(entry.labels)} for entry in listing.entries]


# --- HTTP SD ------------------------------------------------------------------------------------------------------


class TargetServer(ThreadingHTTPServer):
    """Serves `/targets` and `/-/healthy`. `address` is (host, port); port 0 lets the system choose.

    Raises ExporterError when the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], reader: DirectoryReader) -> None:
        self.reader = reader
        self._free = threading.BoundedSemaphore(MAX_REQUESTS)
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise ExporterError(f"cannot listen on {address[0]} port {address[1]}: {error.strerror}") from None

    def server_bind(self) -> None:
        # HTTPServer's own asks the name server for this host's name, which can take half a minute.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("request from %s failed", client_address, exc_info=True)

    @property
    def url(self) -> str:
        """Address of the list."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}/targets"


class _Handler(BaseHTTPRequestHandler):
    server: TargetServer
    server_version = "mindspore-exporter"
    sys_version = ""
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/-/healthy":
            self._answer(200, "text/plain; charset=utf-8", b"ok\n")
        elif path == "/targets":
            self._answer_targets()
        else:
            self._answer(404, "text/plain; charset=utf-8", b"the list of targets is at /targets\n")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer_targets(self) -> None:
        try:
            listing = self.server.reader.current()
        except DirectoryError as error:
            self._answer(500, "text/plain; charset=utf-8", f"{error}\n".encode())
            return
        self._answer(200, "application/json", json.dumps(groups(listing)).encode())

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)


# --- table --------------------------------------------------------------------------------------------------------


def table(listing: Listing, removed: Iterable[str] = ()) -> str:
    """The listing as text, one line a file. `removed`: names of the expired files that are gone."""
    gone = set(removed)
    rows = [("RUN", "RANK", "TARGET", "AGE", "STATE")]
    rows += [_row(entry, "ok") for entry in listing.entries]
    rows += [_row(entry, "expired, removed" if entry.file in gone else "expired") for entry in listing.expired]
    rows += [(_shown(file.file), "", "", f"{file.age:.0f} s", f"refused: {file.reason}") for file in listing.refused]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(text.ljust(width) for text, width in zip(row[:4], widths, strict=True)), row[4]]) for row in rows
    ]
    summary = f"{len(listing.entries)} targets, {len(listing.expired)} expired, {len(listing.refused)} refused"
    return "\n".join([*lines, summary, ""])


def _row(entry: Entry, state: str) -> tuple[str, str, str, str, str]:
    return entry.run, str(entry.rank), entry.target, f"{entry.age:.0f} s", state


def _shown(name: str) -> str:
    """A file name that a terminal can show: anybody may have put control characters into it."""
    return name if name.isprintable() and name.isascii() else ascii(name)


# --- command line -------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mindspore-exporter targets`."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory of the entries (discovery.directory)")
    parser.add_argument(
        "--allow-cidr",
        metavar="CIDR",
        action="append",
        type=_network,
        default=None,
        help="network whose addresses may be scraped, may be repeated; replaces the default: "
        + ", ".join(map(str, DEFAULT_NETWORKS)),
    )
    parser.add_argument("--json", action="store_true", help="show the table as JSON")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--watch", action="store_true", help=f"show the table again every {READ_SECONDS:.0f} s")
    mode.add_argument(
        "--serve",
        metavar="HOST:PORT",
        type=_listen_address,
        help="serve the directory as Prometheus HTTP SD at /targets; without authentication, so prefer 127.0.0.1",
    )


def main(arguments: argparse.Namespace) -> int:
    """Show or serve the directory. Returns 1 when the table holds a refused file, else 0. Raises ExporterError."""
    allowed = AllowedNetworks(arguments.allow_cidr or DEFAULT_NETWORKS)
    if arguments.serve is not None:
        return _serve(arguments.directory, allowed, arguments.serve)
    show = _json_text if arguments.json else table
    if arguments.watch:
        return _watch(arguments.directory, allowed, show)
    listing, removed = _read_and_clean(arguments.directory, allowed)
    sys.stdout.write(show(listing, removed))
    return 1 if listing.refused else 0


def _read_and_clean(directory: Path, allowed: AllowedNetworks) -> tuple[Listing, tuple[str, ...]]:
    listing = read_directory(directory, time.time(), allowed)
    return listing, remove_expired(directory, listing, time.time())


def _json_text(listing: Listing, removed: Iterable[str] = ()) -> str:
    value = asdict(listing)
    del value["abandoned"]
    return json.dumps({**value, "removed": list(removed)}) + "\n"


def _watch(directory: Path, allowed: AllowedNetworks, show: Callable[[Listing, Iterable[str]], str]) -> int:
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() and show is table else ""
    with _stopped_by_signals() as stop:
        while not stop.is_set():
            try:
                text = show(*_read_and_clean(directory, allowed))
            except DirectoryError as error:
                log.error("%s", error)
            else:
                sys.stdout.write(clear + text)
                sys.stdout.flush()
            stop.wait(READ_SECONDS)
    return 0


def _serve(directory: Path, allowed: AllowedNetworks, address: tuple[str, int]) -> int:
    reader = DirectoryReader(lambda: _read_and_clean(directory, allowed)[0])
    with _stopped_by_signals() as stop, TargetServer(address, reader) as server:
        reader.start()
        thread = threading.Thread(target=server.serve_forever, name="targets-http", daemon=True)
        thread.start()
        sys.stdout.write(f"serving {directory} at {server.url}\n")
        sys.stdout.flush()
        stop.wait()
        server.shutdown()
        thread.join()
        reader.stop()
    return 0


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set: as process 1 of a container, SIGTERM without a handler does nothing."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a network such as 10.0.0.0/8 or fc00::/7: {error}") from None


def _listen_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or host_fault(host) or not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:19439 or [::1]:19439")
    return host, int(port)
