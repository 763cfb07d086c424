"""The live table: a row a rank, in place on a terminal, a block every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from .views import Row

BLOCK_SECONDS = 5.0
HEAD = f"{'rank':>4}  {'phase':<13}{'step':>8}{'loss':>11}{'lr':>12}{'samples/s':>12}{'step time':>12}"


def lines(rows: Mapping[int, Row], ranks: int) -> list[str]:
    """The table's lines; a rank that is not seen yet has dashes."""
    return [HEAD, *(_line(rank, rows.get(rank, Row("-"))) for rank in range(ranks))]


def _line(rank: int, row: Row) -> str:
    step = _shown(row.step, "{:.0f}")
    loss = _shown(row.loss, "{:.4f}")
    rate = _shown(row.learning_rate, "{:.3e}")
    speed = _shown(row.samples_per_second, "{:.1f}")
    took = _shown(None if row.step_seconds is None else row.step_seconds * 1000, "{:.1f} ms")
    return f"{rank:>4}  {row.phase:<13}{step:>8}{loss:>11}{rate:>12}{speed:>12}{took:>12}"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


class LiveTable:
    """Shows the table again and again on `stream`."""

    def __init__(self, stream: TextIO, ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._ranks = ranks
        self._clock = clock
        self._in_place = stream.isatty()
        self._drawn = 0
        self._next_block = clock()

    def show(self, rows: Mapping[int, Row], note: str, *, last: bool = False) -> None:
        """Draw the present rows and a line below them. Not on a terminal: at most every 5 seconds, and the `last`."""
        if not self._in_place and not last and self._clock() < self._next_block:
            return
        self._next_block = self._clock() + BLOCK_SECONDS
        text = [*lines(rows, self._ranks), note]
        if self._in_place and self._drawn:
            self._stream.write(f"\x1b[{self._drawn}F\x1b[J")
        self._stream.write("\n".join(text) + "\n" + ("" if self._in_place else "\n"))
        self._stream.flush()
        self._drawn = len(text)
