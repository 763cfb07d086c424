"""Sources beside the training: devices, allocator, process. One file a source, declared in `SOURCES`.

The contract of a source: a class with `name`, `interval_seconds`, `groups` (of the catalogue, activated at start) and
`collect(registry)`, called in the collectors' own thread (or a child process, for libraries that can crash). `collect`
reads once and writes what it read in one transaction; what it could not read it removes, and it raises
`CollectorError` where the source as a whole cannot be read. It never publishes old data after a failed read.
"""

from __future__ import annotations

from typing import Protocol

from ..errors import ExporterError
from ..registry import Registry


class CollectorError(ExporterError):
    """A source cannot be read now; the frame counts it, publishes its failure and backs off."""


class Collector(Protocol):
    """One source."""

    name: str
    interval_seconds: float
    groups: tuple[str, ...]

    def collect(self, registry: Registry) -> None:
        """Read once and write what was read; raises CollectorError."""


SOURCES: tuple[type[Collector], ...] = ()
"""A new source is one file and one row here."""
