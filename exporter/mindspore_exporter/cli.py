"""The command line: programs beside the training. Each command's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
from collections.abc import Sequence

from . import __version__
from .errors import ExporterError
from .metrics import Family

COMMANDS = {
    "demo": ("mindspore_exporter.demo", "train on this machine and watch it through Prometheus"),
    "doctor": ("mindspore_exporter.doctor", "find out why a training is not seen"),
    "targets": ("mindspore_exporter.targets", "show the ranks that announced themselves, or serve them as HTTP SD"),
    "assets": ("mindspore_exporter.assets", "write out the shipped rules, dashboards and configurations"),
    "baseline": ("mindspore_exporter.baseline", "save a run's baseline for later runs"),
}
"""Command, the module that has its `add_arguments` and `main`, and its one line of help. A new program is one row."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit status. Errors that the user can mend are one message on stderr, status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser(words).parse_args(words)
    try:
        return int(parsed.program(parsed))
    except ExporterError as error:
        print(f"mindspore-exporter: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mindspore-exporter", description="Prometheus exporter for MindSpore training"
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="validate a configuration, or print the reference of all keys")
    check.add_argument("file", nargs="?", help="the YAML (default: environment only)")
    check.add_argument("--reference", action="store_true", help="print every key with type, default and meaning")
    check.set_defaults(program=_check)
    listing = commands.add_parser("metrics", help="print the catalogue of metrics")
    listing.add_argument("--format", choices=("md", "json"), default="md")
    listing.set_defaults(program=_metrics)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name in words:
            program = importlib.import_module(module)
            program.add_arguments(command)
            command.set_defaults(program=program.main)
    return parser


def _check(parsed: argparse.Namespace) -> int:
    from . import config

    if parsed.reference:
        print(markdown_table(("key", "type", "default", "meaning"), config.reference()))
        return 0
    loaded = config.load(parsed.file)
    print(f"{parsed.file or 'the environment'}: ok")
    changed = loaded.model_dump(mode="json", exclude_defaults=True)
    for key, value in sorted(changed.items()):
        print(f"  {key}: {json.dumps(value, ensure_ascii=False)}")
    return 0


def _metrics(parsed: argparse.Namespace) -> int:
    from . import metrics

    rows = metrics.reference()
    if parsed.format == "json":
        print(json.dumps(rows, indent=2))
        return 0
    print(
        markdown_table(
            ("family", "type", "labels", "lean", "meaning"),
            [
                (f"`{family.name}`", family.kind, _labels(family), _lean(family.lean), family.help)
                for family in metrics.CATALOGUE.values()
            ],
        )
    )
    return 0


def _labels(family: Family) -> str:
    names = ", ".join(family.labels)
    return f"{names} = {', '.join(family.values)}" if family.values else names


def _lean(kept: bool | tuple[str, ...]) -> str:
    return ", ".join(kept) if isinstance(kept, tuple) else "yes" if kept else ""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
