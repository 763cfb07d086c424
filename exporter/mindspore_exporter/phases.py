"""The phase state machine of a rank and its wall-time account.

The worker feeds it the records in order; every moment of the process is given to exactly one activity, so that the
activities' sum is the process's wall time. All times are `time.monotonic()` seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from .metrics import ACTIVITIES, PHASES

ACTIVITY_OF_PHASE = {
    "starting": "startup",
    "loading": "load",
    "compiling": "compile",
    "evaluating": "evaluation",
    "checkpointing": "checkpoint",
    "paused": "paused",
}
"""Phases whose time needs no closer look; training is split by its records."""

INTERRUPTING = ("evaluating", "checkpointing", "paused", "loading")
"""Phases that come inside another and give way to it again."""

OVER = ("finished", "failed")


class Interval(NamedTuple):
    """What lies between two records. `seconds` is end to end; `data_wait` is None where it cannot be told apart
    (sink mode, first record). `clean`: no checkpoint, evaluation, pause or compile in it."""

    seconds: float
    data_wait: float | None
    clean: bool


class Phases:
    """Phase of this rank, since when, and where its wall time went (`account`, seconds by activity)."""

    def __init__(self, at: float, wall: float) -> None:
        self.phase = "starting"
        self.began_at = at
        self.since_wall = wall
        self.account = dict.fromkeys(ACTIVITIES, 0.0)
        self._until = at
        self._beneath: list[str] = []
        self._last_end: float | None = None
        self._excluded = 0.0
        self._checkpoint = 0.0
        self._clean = True
        self._ticked: dict[str, float] = {}

    def enter(self, phase: str, at: float, wall: float) -> None:
        """A phase begins. Interrupting phases remember what they interrupt; the others start afresh."""
        if phase not in PHASES:
            raise ValueError(f"no phase {phase!r}; allowed: {', '.join(PHASES)}")
        if phase == self.phase:
            return
        self._spend_until(at)
        if phase in INTERRUPTING:
            self._beneath.append(self.phase)
            self._clean = False
        else:
            self._beneath.clear()
        self._ticked.clear()
        self._change(phase, wall)

    def leave(self, phase: str, at: float, wall: float) -> None:
        """An interrupting phase ends and what it interrupted goes on. Ignored where the phase is not the present one."""
        if phase != self.phase or not self._beneath:
            return
        self._exclude_until(at)
        self._change(self._beneath.pop(), wall)

    def tick(self, at: float, activity: str) -> None:
        """Account for a training that has sent no record for a while, by what the training thread says it is doing."""
        if self.phase == "training":
            spent = max(0.0, at - self._until)
            self.account[activity] += spent
            self._ticked[activity] = self._ticked.get(activity, 0.0) + spent
            self._until = max(self._until, at)
        elif self.phase in INTERRUPTING:
            self._exclude_until(at)
        else:
            self._spend_until(at)

    def compile_began(self, at: float, wall: float) -> None:
        """The first step of a graph began; what was until now was the start (or the pause between two trainings)."""
        self.enter("compiling", at, wall)
        self._last_end = None

    def record(
        self, began: float, ended: float, wall: float, others: float, *, compiled: bool, sink: bool
    ) -> Interval | None:
        """A record came: split the time since the last one. None for a record without a predecessor."""
        first, last_end = self._last_end is None or compiled, self._last_end
        clean, excluded = self._clean and not compiled, self._excluded
        if self._checkpoint:
            # A checkpoint is written inside a callback, so the other callbacks' time holds it.
            others = max(0.0, others - self._checkpoint)
        if compiled:
            self._spend_until(ended)
        else:
            self._split(began, ended, others)
        self._ticked.clear()
        self._last_end, self._excluded, self._checkpoint, self._clean = ended, 0.0, 0.0, True
        if self.phase != "training":
            self._beneath.clear()
            self._change("training", wall)
        if first or last_end is None:
            return None
        wait = None if sink else max(0.0, began - last_end - others - excluded)
        return Interval(ended - last_end, wait, clean)

    def _split(self, began: float, ended: float, others: float) -> None:
        """Give [until, ended] to data wait, other callbacks and the step."""
        if self._ticked:
            self._split_the_rest(began, ended, others)
            return
        account, until = self.account, self._until
        if ended > until:
            gap = began - until if until < began < ended else ended - until if began >= ended else 0.0
            other = others if others < gap else gap
            account["other"] += other
            account["data_wait"] += gap - other
            account["step"] += ended - until - gap
            self._until = ended

    def _split_the_rest(self, began: float, ended: float, others: float) -> None:
        """The same after ticks, whose guesses count against what each activity should have had in the whole interval."""
        total = max(0.0, ended - self._until)
        start = self._until - sum(self._ticked.values())
        gap = min(max(0.0, began - start), max(0.0, ended - start))
        wanted = {
            "other": min(others, gap),
            "data_wait": max(0.0, gap - others),
            "step": max(0.0, ended - start - gap),
        }
        missing = {name: max(0.0, seconds - self._ticked.get(name, 0.0)) for name, seconds in wanted.items()}
        scale = total / sum(missing.values()) if sum(missing.values()) > 0 else 0.0
        for name, seconds in missing.items():
            self.account[name] += seconds * scale
        self._until = max(self._until, ended)

    def _spend_until(self, at: float) -> None:
        spent = max(0.0, at - self._until)
        if self.phase not in OVER:
            self.account[ACTIVITY_OF_PHASE.get(self.phase, "other")] += spent
        self._until = max(self._until, at)

    def _exclude_until(self, at: float) -> None:
        """Spend time that belongs to an interrupting phase: no step and no data wait may claim it."""
        began = self._until
        self._spend_until(at)
        self._excluded += self._until - began
        if self.phase == "checkpointing":
            self._checkpoint += self._until - began

    def _change(self, phase: str, wall: float) -> None:
        if phase != self.phase:
            self.phase = phase
            self.since_wall = wall
