"""What survives a restart: the attempt, the highest step, the baseline.

One small JSON file a rank. It belongs to one run, rank, world size and configuration; where any of them changed, what it
says is about another run and is ignored, so that the attempt starts at 1 again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .baseline import Baseline, from_data, to_data
from .config import MonitorConfig
from .errors import ConfigError
from .fileio import write_atomically
from .identity import in_kubernetes

log = logging.getLogger(__name__)

FORMAT = 1
MAX_BYTES = 64 * 1024


@dataclass(frozen=True)
class RunState:
    """State of a run on one rank: `attempt` counts from 1, `highest_step` is the highest global step ever done."""

    attempt: int
    highest_step: int
    baseline: Baseline | None


def next_attempt(found: RunState | None) -> RunState:
    """State of the attempt that begins now, after what an earlier one left."""
    return RunState(1, 0, None) if found is None else replace(found, attempt=found.attempt + 1)


def advance(state: RunState, step: int, baseline: Baseline | None) -> RunState:
    """State after the global step `step` was done."""
    return replace(state, highest_step=max(state.highest_step, step), baseline=baseline or state.baseline)


def config_hash(config: MonitorConfig) -> str:
    """Digest of what gives a baseline its meaning: windows, losses, batch, where the baseline comes from. Ports, paths and
    thresholds may change between two attempts of one run."""
    meaning = config.model_dump(mode="json", include={"loss", "data", "baseline", "window"})
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:16]


def default_directory(config: MonitorConfig, environment: Mapping[str, str]) -> Path | None:
    """Where state is kept: as configured, else in the user's state directory; None in Kubernetes, where nothing of a
    pod's file system survives it, and where there is no home."""
    if config.state_dir is not None:
        return config.state_dir
    if in_kubernetes(environment):
        return None
    if environment.get("XDG_STATE_HOME"):
        return Path(environment["XDG_STATE_HOME"]) / "mindspore-exporter"
    if environment.get("HOME"):
        return Path(environment["HOME"]) / ".local" / "state" / "mindspore-exporter"
    return None


class StateFile:
    """The state file of one rank."""

    def __init__(self, directory: Path, run: str, rank: int, world_size: int, config_hash: str) -> None:
        self.path = directory / f"{run}-rank{rank}.json"
        self._key = {"format": FORMAT, "run": run, "rank": rank, "world_size": world_size, "config": config_hash}

    def load(self) -> RunState | None:
        """What an earlier attempt left; None where nothing did, or where it cannot be used (the log says why). Raises
        OSError where the directory cannot be read at all."""
        try:
            with self.path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        fault = "larger than a state is" if len(text) > MAX_BYTES else None
        try:
            data = None if fault else json.loads(text)
            state = None if fault else self._state(data)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            state, fault = None, f"not a state: {error}"
        if fault:
            log.warning("exporter: %s is ignored: %s", self.path, fault)
        return state

    def _state(self, data: Any) -> RunState | None:
        if not isinstance(data, dict):
            raise TypeError(f"must have keys and values, has a {type(data).__name__}")
        changed = [name for name, value in self._key.items() if data.get(name) != value]
        if changed:
            log.info("exporter: %s is of another %s: attempts are counted afresh", self.path, ", ".join(changed))
            return None
        attempt, step = data["attempt"], data["highest_step"]
        if not (isinstance(attempt, int) and isinstance(step, int) and 1 <= attempt < 2**31 and 0 <= step < 2**63):
            raise ValueError(f"attempt {attempt!r}, highest_step {step!r}")
        known = data.get("baseline")
        return RunState(attempt, step, None if known is None else from_data(known, str(self.path)))

    def save(self, state: RunState) -> None:
        """Write the state, whole or not at all. Raises OSError."""
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        data = {
            **self._key,
            "attempt": state.attempt,
            "highest_step": state.highest_step,
            "baseline": None if state.baseline is None else to_data(state.baseline),
        }
        write_atomically(self.path, json.dumps(data).encode(), 0o640)
