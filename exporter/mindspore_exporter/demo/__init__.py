"""`mindspore-exporter demo`: train on this machine, watch it through Prometheus, compare what was stored with what was run.

msrun starts the ranks of `examples/tiny_transformer.py` on the CPU; each announces its endpoint in a directory; Prometheus,
with the shipped configuration, finds them there. Without a Prometheus the demo reads the endpoints itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_STEPS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `mindspore-exporter demo`."""
    parser.add_argument("--ranks", type=_count, default=2, help="ranks to train on (default: 2)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=_count, default=DEFAULT_STEPS, help=f"steps to train (default: {DEFAULT_STEPS})"
    )
    length.add_argument("--seconds", type=_seconds, help="train for this time instead, counted from the first step")
    parser.add_argument(
        "--port", type=_port, default=19440, metavar="BASE", help="endpoint of rank r: BASE + r (default: 19440)"
    )
    parser.add_argument(
        "--prometheus-port", type=_port, default=9090, metavar="PORT", help="port of Prometheus (default: 9090)"
    )
    parser.add_argument(
        "--dir", type=Path, help="empty directory for logs and data (default: a temporary one, removed at the end)"
    )
    parser.add_argument("--keep", action="store_true", help="leave Prometheus running and the directory in place")
    parser.add_argument("--no-prometheus", action="store_true", help="read the endpoints instead")
    parser.epilog = "A busy port is not an error: another one is taken. Ctrl-C leaves nothing running."


def main(arguments: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when what was stored equals what the run logged, 1 when it differs or the run failed.

    Whatever this process started is stopped before it returns or raises. Raises DemoError when it cannot begin.
    """
    from .show import run

    return run(arguments)


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; allowed: 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds; allowed: more than 0, at most 86400")
    return seconds
