"""Specification of `phases.py`: every second belongs to one activity, and interruptions are not steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspore_exporter.metrics import PHASES
from mindspore_exporter.phases import Interval, Phases

WALL = 1_000_000.0


def started(at: float = 0.0) -> Phases:
    return Phases(at, WALL + at)


def trained(first_end: float = 10.0) -> Phases:
    """A run whose first step compiled from 4 to `first_end`."""
    phases = started()
    phases.compile_began(4.0, WALL + 4)
    phases.record(4.0, first_end, WALL + first_end, 0.0, compiled=True, sink=False)
    return phases


def record(phases: Phases, began: float, ended: float, others: float = 0.0, sink: bool = False) -> Interval | None:
    return phases.record(began, ended, WALL + ended, others, compiled=False, sink=sink)


def test_a_rank_is_starting_until_its_first_step_compiles() -> None:
    phases = started()
    assert phases.phase == "starting"
    phases.compile_began(4.0, WALL + 4)
    assert (phases.phase, phases.since_wall, phases.account["startup"]) == ("compiling", WALL + 4, 4.0)


def test_the_first_step_is_compile_time_and_gives_no_interval() -> None:
    phases = started()
    phases.compile_began(4.0, WALL + 4)
    assert phases.record(4.0, 10.0, WALL + 10, 0.0, compiled=True, sink=False) is None
    assert (phases.phase, phases.account["compile"], phases.account["step"]) == ("training", 6.0, 0.0)


def test_an_interval_is_split_into_data_wait_other_callbacks_and_step() -> None:
    phases = trained()
    assert record(phases, 12.0, 15.0, others=0.5) == Interval(5.0, 1.5, True)
    assert (phases.account["data_wait"], phases.account["other"], phases.account["step"]) == (1.5, 0.5, 3.0)


def test_sink_mode_knows_no_data_wait() -> None:
    assert record(trained(), 10.0, 15.0, sink=True) == Interval(5.0, None, True)


def test_a_checkpoint_is_not_a_step_and_not_data_wait() -> None:
    phases = trained()
    phases.enter("checkpointing", 10.5, WALL + 10.5)
    assert phases.phase == "checkpointing"
    phases.leave("checkpointing", 13.5, WALL + 13.5)
    assert phases.phase == "training"
    # The checkpoint was written inside another callback, whose 3.2 seconds hold it.
    interval = record(phases, 14.0, 15.0, others=3.2)
    assert interval is not None
    assert not interval.clean
    assert interval.data_wait == pytest.approx(0.8)
    assert phases.account["checkpoint"] == 3.0


def test_the_interval_after_an_interrupted_one_is_clean_again() -> None:
    phases = trained()
    phases.enter("evaluating", 11.0, WALL)
    phases.leave("evaluating", 13.0, WALL)
    record(phases, 13.0, 14.0)
    assert record(phases, 14.5, 15.0) == Interval(1.0, 0.5, True)


def test_time_goes_on_while_no_record_comes_and_is_not_counted_twice() -> None:
    phases = trained()
    phases.tick(11.0, "step")
    phases.tick(12.0, "step")
    assert phases.account["step"] == 2.0
    record(phases, 10.0, 13.0)
    assert phases.account["step"] == 3.0
    assert sum(phases.account.values()) == pytest.approx(13.0)


def test_an_activity_never_shrinks_when_a_tick_guessed_wrong() -> None:
    phases = trained()
    phases.tick(12.0, "data_wait")
    record(phases, 10.5, 13.0)
    assert phases.account["data_wait"] == 2.0
    assert sum(phases.account.values()) == pytest.approx(13.0)


def test_nothing_is_accounted_after_the_end() -> None:
    phases = trained()
    phases.enter("finished", 12.0, WALL + 12)
    phases.tick(20.0, "other")
    assert sum(phases.account.values()) == pytest.approx(12.0)


def test_training_goes_on_after_a_failure_that_was_repaired() -> None:
    phases = trained()
    phases.enter("failed", 12.0, WALL + 12)
    phases.enter("starting", 20.0, WALL + 20)
    record(phases, 21.0, 22.0)
    assert phases.phase == "training"


def test_a_phase_nobody_knows_is_refused_with_the_list_of_those_allowed() -> None:
    with pytest.raises(ValueError, match="no phase 'sleeping'; allowed: starting, loading"):
        started().enter("sleeping", 1.0, WALL)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "record",
                "compile",
                "tick_step",
                "tick_data_wait",
                "tick_other",
                "eval",
                "uneval",
                "save",
                "saved",
                "fail",
                "start",
            ]
        ),
        st.floats(0.001, 50.0),
        st.floats(0.0, 1.0),
        st.floats(0.0, 1.0),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_the_account_is_the_wall_time_whatever_happens(actions: list[tuple[str, float, float, float]]) -> None:
    phases, now, over = started(), 0.0, 0.0
    for action, seconds, share, others in actions:
        before, now = now, now + seconds
        was_over = phases.phase in ("finished", "failed")
        earlier = dict(phases.account)
        if action == "record":
            record(phases, before + seconds * share, now, others=others * seconds)
        elif action == "compile":
            phases.compile_began(now, WALL + now)
        elif action.startswith("tick_"):
            phases.tick(now, action.removeprefix("tick_"))
        elif action in ("eval", "save"):
            phases.enter({"eval": "evaluating", "save": "checkpointing"}[action], now, WALL + now)
        elif action in ("uneval", "saved"):
            phases.leave({"uneval": "evaluating", "saved": "checkpointing"}[action], now, WALL + now)
        else:
            phases.enter({"fail": "failed", "start": "starting"}[action], now, WALL + now)
        assert phases.phase in PHASES
        assert all(phases.account[name] >= earlier[name] - 1e-9 for name in earlier)
        over += seconds if was_over else 0.0
    phases.tick(now, "other")
    assert sum(phases.account.values()) <= now + 1e-6
    if not over:
        phases.enter("failed", now, WALL + now)
        assert sum(phases.account.values()) == pytest.approx(now)
