"""How Prometheus finds a rank without Kubernetes: one file_sd entry a rank, with the port that was really bound.

The entry has a fixed name, so a restarted rank replaces its own entry instead of leaving a second one. Nothing here
starts a thread or keeps time: the exporter's file thread calls `write` at the start, `touch` after every
`refresh_delay`, and `remove` at the end. Entries of ranks that died without a word are removed by
`mindspore-exporter targets`, which reads what is written here.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from .errors import ConfigError
from .fileio import write_atomically
from .metrics import CATALOGUE, CONSTANT_LABELS

log = logging.getLogger(__name__)

REFRESH_SECONDS = 60.0
"""Mean time between two refreshes of an entry."""
REFRESH_JITTER = 0.2
"""Share of the refresh time by which ranks differ, so that thousands of them do not meet on one file server."""
EXPIRY_SECONDS = 600.0
"""An entry that was not refreshed for so long belongs to a rank that is gone."""
MODE = 0o640
"""Prometheus reads by group; nobody but the run's own user writes."""
MAX_BYTES = 16 * 1024
"""Largest entry: the labels at their limits are a tenth of it."""
MAX_LABELS = 16
"""Most labels that a user adds; with the widest family they stay under the shipped `label_limit`."""
MAX_LABEL_NAME = 64
MAX_LABEL_VALUE = 256
"""The shipped `label_name_length_limit` and `label_value_length_limit`: a longer one would fail every scrape."""

META_PREFIX = "__meta_mindspore_"
META_LABELS = tuple(META_PREFIX + name for name in ("run", "rank", "world_size", "local_rank", "host"))
"""What an entry says of its rank; Prometheus has these while relabelling only."""
SCHEMES = ("http", "https")

RESERVED_LABELS = frozenset(
    {"job", "instance", "le", "quantile", *CONSTANT_LABELS, *(label for f in CATALOGUE.values() for label in f.labels)}
)
"""Names that a target label must not have: `job` and `instance` are the scrape's, and a target label with the name of a
series' own label renames that one to `exported_...` (`honor_labels: false`), which no rule or dashboard knows."""

FILE_NAME = re.compile(r"(?P<run>[A-Za-z0-9._-]{1,63})-rank(?P<rank>0|[1-9][0-9]{0,6})\.json")
TEMPORARY_NAME = re.compile(r"\.(?P<name>.+\.json)\.[a-z0-9_]{8}\.tmp")
"""An entry being written. It must not end in .json: Go's `*` also matches a leading dot."""
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Neither a symbolic link nor a pipe in a shared directory may lead or hold the reader."""


class Uniform(Protocol):
    """The one thing `refresh_delay` asks of a source of chance; `random` itself and `random.Random()` have it."""

    def uniform(self, a: float, b: float, /) -> float: ...


def refresh_delay(source: Uniform = random) -> float:
    """Seconds until the next refresh: 60, give or take a fifth."""
    return REFRESH_SECONDS * source.uniform(1 - REFRESH_JITTER, 1 + REFRESH_JITTER)


def host_port(address: str, port: int) -> str:
    """`address:port` as Prometheus writes it, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def host_fault(host: str) -> str | None:
    """Why `host` cannot stand in a target, None when it can: an IP address without zone, or a host name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None if HOST_NAME.fullmatch(host) else f"{host!a} is neither an IP address nor a host name"
    zone = getattr(address, "scope_id", None)
    return f"{host} has a zone, which means nothing on another host" if zone else None


def label_fault(name: str, value: str) -> str | None:
    """Why a user may not add this target label, None when it may be added."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"label {name!a}: allowed are letters, digits and _, not a digit first"
    if len(name) > MAX_LABEL_NAME:
        return f"label {name}: longer than {MAX_LABEL_NAME} characters"
    if name.startswith("__"):
        return f"label {name}: names that begin with __ steer the scrape and are not free"
    if name in RESERVED_LABELS:
        return f"label {name}: the scrape or the exporter's own series have this label"
    return label_value_fault(name, value)


def label_value_fault(name: str, value: str) -> str | None:
    """Why `value` cannot be the value of a label, None when it can."""
    if len(value) > MAX_LABEL_VALUE:
        return f"label {name}: its value has {len(value)} characters, allowed are {MAX_LABEL_VALUE}"
    if not value.isprintable():
        return f"label {name}: its value {value[:40]!a} is not printable"
    return None


class TargetFile:
    """The file_sd entry of one rank.

    `directory` must exist: one that the exporter made would have the wrong group, and on a node where the shared file
    system is not mounted nobody would read it. `address` is an IP address or host name that Prometheus reaches, `port`
    the one that was bound. `labels`: those of META_LABELS that the caller knows (run and rank are added) and the user's
    target labels. Raises ConfigError when a value cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        rank: int,
        *,
        address: str,
        port: int,
        scheme: str = "http",
        labels: Mapping[str, str],
    ) -> None:
        name = f"{run}-rank{rank}.json"
        fault = _entry_fault(name, address, port, scheme, labels)
        if fault:
            raise ConfigError(f"discovery: {fault}")
        self.path = Path(directory) / name
        self.target = host_port(address, port)
        own = {META_PREFIX + "run": run, META_PREFIX + "rank": str(rank)}
        if scheme != "http":
            own["__scheme__"] = scheme
        group = {"targets": [self.target], "labels": {**labels, **own}}
        self._data = json.dumps([group], indent=1, sort_keys=True).encode() + b"\n"
        self._told = False

    def write(self) -> None:
        """Write the entry, replacing one of an earlier attempt. Raises OSError."""
        write_atomically(self.path, self._data, MODE)

    def touch(self) -> None:
        """Say that this rank still lives: refresh the file's time, or write it again when it has vanished.

        An entry under the same name for another address is left alone while it is refreshed (two jobs share a run
        name, the newer one has it), and taken back once it has expired. Raises OSError.
        """
        try:
            descriptor = os.open(self.path, READ_FLAGS)
        except FileNotFoundError:
            self.write()
            return
        with os.fdopen(descriptor, "rb") as file:
            target = _target_in(file.read(MAX_BYTES))
            if target == self.target:
                os.utime(descriptor)  # without a time: the file server's clock, not this node's
                return
            age = time.time() - os.fstat(descriptor).st_mtime
        if target is None or age > EXPIRY_SECONDS:
            self.write()
        elif not self._told:
            self._told = True
            log.warning(
                "%s is another process's (%s): Prometheus will not find this rank at %s; give each run its own name",
                self.path,
                target,
                self.target,
            )

    def remove(self) -> None:
        """Remove the entry where it is still this rank's; a missing one is fine. Raises OSError."""
        try:
            descriptor = os.open(self.path, READ_FLAGS)
        except FileNotFoundError:
            return
        with os.fdopen(descriptor, "rb") as file:
            ours = _target_in(file.read(MAX_BYTES)) == self.target
        if ours:
            self.path.unlink(missing_ok=True)


def _entry_fault(name: str, address: str, port: int, scheme: str, labels: Mapping[str, str]) -> str | None:
    if not FILE_NAME.fullmatch(name):
        return f"{name!a} is not <run>-rank<rank>.json; a run has 1 to 63 letters, digits and . _ -"
    if not 1 <= port <= 65535:
        return f"port {port} is not one that was bound; allowed: 1 to 65535"
    if scheme not in SCHEMES:
        return f"scheme {scheme!a}; allowed: {', '.join(SCHEMES)}"
    fault = host_fault(address)
    return f"address {fault}" if fault else labels_fault(labels)


def labels_fault(labels: Mapping[str, str]) -> str | None:
    """Why these labels of an entry (the exporter's own and the user's) cannot be used, None when they can."""
    users = [name for name in labels if name not in META_LABELS]
    if len(users) > MAX_LABELS:
        return f"{len(users)} labels; allowed are {MAX_LABELS}"
    for name, value in labels.items():
        fault = label_value_fault(name, value) if name in META_LABELS else label_fault(name, value)
        if fault:
            return fault
    return None


def _target_in(data: bytes) -> str | None:
    """The address of an entry; None where it is not an entry."""
    try:
        (group,) = json.loads(data)
        (target,) = group["targets"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return target if isinstance(target, str) else None
