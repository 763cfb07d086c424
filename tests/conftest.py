"""Shared by all suites: the package is imported from the checkout, and nothing of the machine's own set-up leaks in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "exporter"))
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable of the exporter or of a scheduler from outside; state goes to the test's own directory."""
    for name in list(os.environ):
        if name.startswith(("MINDSPORE_EXPORTER_", "RANK_", "MS_", "SLURM_", "OMPI_", "VC_", "JOB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
