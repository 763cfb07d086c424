"""`mindspore-exporter assets --out DIR`: the dashboards, rules and configurations that the wheel carries, as files.

In a source checkout they are the repository's own `prometheus/` and `grafana/`; the wheel holds the same bytes under
`mindspore_exporter/assets/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from .errors import AssetError
from .fileio import write_atomically

if TYPE_CHECKING:
    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

FOLDERS = ("grafana", "prometheus")
MODE = 0o644


@dataclass
class Outcome:
    """What `write_assets` did: relative paths, in order."""

    written: list[PurePosixPath] = field(default_factory=list)
    unchanged: list[PurePosixPath] = field(default_factory=list)
    kept: list[PurePosixPath] = field(default_factory=list)
    """Files that differ from the shipped ones and were left as they are."""


def asset_root() -> Traversable:
    """The folder that holds `grafana` and `prometheus`. Raises AssetError when neither place has them."""
    installed = resources.files("mindspore_exporter") / "assets"
    checkout = Path(__file__).resolve().parents[2]
    for root in (installed, checkout):
        if all((root / folder).is_dir() for folder in FOLDERS):
            return root
    raise AssetError(
        f"the shipped files are missing: neither {installed} nor {checkout} has {' and '.join(FOLDERS)};"
        " install the package again"
    )


def assets() -> dict[PurePosixPath, bytes]:
    """Every shipped file: relative path and content. Raises AssetError."""
    root = asset_root()
    return dict(sorted(item for folder in FOLDERS for item in _files(root / folder, PurePosixPath(folder))))


def write_assets(out: Path, force: bool) -> Outcome:
    """Write the shipped files below `out`, each whole or not at all.

    A file that is there with another content is kept unless `force`. Raises AssetError when a file cannot be written.
    """
    outcome = Outcome()
    for relative, data in assets().items():
        path = out / relative
        try:
            present = path.read_bytes() if path.exists() else None
            if present == data:
                outcome.unchanged.append(relative)
            elif present is not None and not force:
                outcome.kept.append(relative)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, data, MODE)
                outcome.written.append(relative)
        except OSError as error:
            raise AssetError(f"{path}: cannot be written: {error.strerror}") from None
    return outcome


def _files(folder: Traversable, relative: PurePosixPath) -> Iterator[tuple[PurePosixPath, bytes]]:
    for item in folder.iterdir():
        if item.name.startswith(".") or item.name == "__pycache__":
            continue
        if item.is_dir():
            yield from _files(item, relative / item.name)
        else:
            yield relative / item.name, item.read_bytes()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mindspore-exporter assets`."""
    parser.add_argument(
        "--out", metavar="DIR", type=Path, required=True, help="directory to write to; is made if missing"
    )
    parser.add_argument("--force", action="store_true", help="overwrite files that differ from the shipped ones")


def main(arguments: argparse.Namespace) -> int:
    """Write the files and say which. Returns 1 when a file was kept because it differs, else 0. Raises AssetError."""
    outcome = write_assets(arguments.out, arguments.force)
    for relative in outcome.written:
        sys.stdout.write(f"written    {arguments.out / relative}\n")
    for relative in outcome.unchanged:
        sys.stdout.write(f"unchanged  {arguments.out / relative}\n")
    for relative in outcome.kept:
        sys.stdout.write(
            f"kept       {arguments.out / relative} (differs from the shipped file; --force overwrites it)\n"
        )
    return 1 if outcome.kept else 0
