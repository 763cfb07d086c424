"""The exporter's exceptions; everything the package raises on purpose derives from `ExporterError`."""

from __future__ import annotations


class ExporterError(Exception):
    """Something the user can mend; the message says what, where, which value, what is allowed."""


class ConfigError(ExporterError):
    """A configuration that cannot be used."""


class EndpointError(ExporterError):
    """The endpoint cannot be opened."""


class AssetError(ExporterError):
    """A shipped file is missing or cannot be written out."""
