"""Who this process is: rank, world, host, parallel coordinates, run name.

Read once, when the exporter starts. MindSpore is asked only where it is already imported, and only through calls that
neither initialise communication nor start a collective.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANK_VARIABLES = ("RANK_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "RANK")
SIZE_VARIABLES = ("RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "MS_WORKER_NUM", "SLURM_NTASKS", "WORLD_SIZE")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "DEVICE_ID")
RUN_VARIABLES = ("VC_JOB_NAME", "TRAINJOB_NAME", "JOB_NAME", "SLURM_JOB_NAME")
"""Where schedulers put the job's name: Volcano, Kubeflow Trainer, a label handed down by the pod, Slurm."""
RUN_ID_VARIABLES = ("SLURM_JOB_ID", "VC_JOB_UID", "JOB_UID")
LOOPBACK = ("127.", "localhost", "::1")


@dataclass(frozen=True)
class Identity:
    """This rank. Coordinates are decimal texts, empty where they are not known."""

    run: str
    run_id: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    device_id: int | None
    dp_rank: str = ""
    tp_rank: str = ""
    pp_rank: str = ""
    cp_rank: str = ""
    ep_rank: str = ""
    pp_stages: str = ""

    def constant_labels(self) -> dict[str, str]:
        """Labels that every series of this process carries."""
        return {"run": self.run, "rank": str(self.rank)}

    def info(self) -> dict[str, str]:
        """Labels of `mindspore_rank_info`."""
        names = ("host", "run_id", "dp_rank", "tp_rank", "pp_rank", "cp_rank", "ep_rank", "pp_stages")
        return {"local_rank": str(self.local_rank), **{name: getattr(self, name) for name in names}}


def is_scheduler(environment: Mapping[str, str] = os.environ) -> bool:
    """True in msrun's scheduler, which runs the training script with RANK_ID=0 and trains nothing."""
    return environment.get("MS_ROLE") in ("MS_SCHED", "MS_PSERVER")


def in_kubernetes(environment: Mapping[str, str] = os.environ) -> bool:
    """True inside a pod: the kubelet sets this variable in every container."""
    return "KUBERNETES_SERVICE_HOST" in environment


def detect(run: str | None, environment: Mapping[str, str] = os.environ) -> Identity:
    """Identity of this process. `run`: the configured name, None to take the scheduler's."""
    host = socket.gethostname()
    communication = _communication()
    rank = _asked(communication, "get_rank", _number(environment, RANK_VARIABLES, 0))
    world = _asked(communication, "get_group_size", _number(environment, SIZE_VARIABLES, 1))
    local = _number(environment, LOCAL_RANK_VARIABLES, 0)
    if world > 1 and _initialised(communication):
        # Counted by host name, so it stays unique when two "nodes" share a host.
        local = _asked(communication, "get_local_rank", local)
    return Identity(
        run=run or run_name(environment, host),
        run_id=_text(environment, RUN_ID_VARIABLES),
        rank=rank,
        world_size=max(world, rank + 1),
        local_rank=local,
        host=host,
        device_id=_number(environment, ("DEVICE_ID",), None),
        **_coordinates(rank, world),
    )


def run_name(environment: Mapping[str, str], host: str) -> str:
    """The run's name where none is configured: the same on all ranks and across restarts, never a constant."""
    for name in RUN_VARIABLES:
        if environment.get(name):
            return _legal(environment[name])
    index = environment.get("JOB_COMPLETION_INDEX")
    pod = environment.get("HOSTNAME", "")
    if index is not None and pod:
        # An indexed Job names its pods <job>-<index>-<random>; the host name is <job>-<index>.
        return _legal(re.sub(rf"-{re.escape(index)}(-[a-z0-9]{{5}})?$", "", pod))
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "training"
    scheduler, port = environment.get("MS_SCHED_HOST", ""), environment.get("MS_SCHED_PORT", "")
    if scheduler and port:
        where = host if scheduler.startswith(LOOPBACK) else scheduler
        return _legal(f"{script}-{where}-{port}")
    return _legal(f"{script}-{host}")


def _legal(name: str) -> str:
    """A run name of the letters allowed. What had others keeps a digest, so that names do not fall together."""
    legal = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
    if name.isascii() and legal:
        return legal[:63]
    return f"{legal[:50] or 'run'}-{zlib.crc32(name.encode()):08x}"


def _text(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: Any) -> Any:
    text = _text(environment, names)
    return int(text) if text.isdecimal() else default


def _communication() -> Any:
    return sys.modules.get("mindspore.communication")


def _initialised(communication: Any) -> bool:
    try:
        return bool(communication.GlobalComm.INITED)
    except AttributeError:
        return False


def _asked(communication: Any, call: str, default: int) -> int:
    """MindSpore's answer where communication is initialised; before, its calls only repeat the environment."""
    if communication is None or not _initialised(communication):
        return default
    try:
        return int(getattr(communication, call)())
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return default


def _coordinates(rank: int, world: int) -> dict[str, str]:
    """Parallel coordinates of plain MindSpore: data parallel by rank, pipeline stages from the context."""
    mindspore = sys.modules.get("mindspore")
    if mindspore is None:
        return {}
    try:
        mode = str(mindspore.get_auto_parallel_context("parallel_mode"))
        stages = int(mindspore.get_auto_parallel_context("pipeline_stages") or 1)
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return {}
    if mode in ("stand_alone", "data_parallel"):
        return {"dp_rank": str(rank), "tp_rank": "0", "pp_rank": "0", "cp_rank": "0", "ep_rank": "0", "pp_stages": "1"}
    return {"pp_rank": str(rank // max(1, world // stages)), "pp_stages": str(stages)}
