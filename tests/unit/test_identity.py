"""Specification of `identity.py`: rank, run name and what is not known."""

from __future__ import annotations

import sys

import pytest

from mindspore_exporter.identity import detect, is_scheduler, run_name


@pytest.fixture(autouse=True)
def without_mindspore(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mindspore", "mindspore.communication"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])


@pytest.mark.parametrize(
    ("environment", "rank", "world", "local"),
    [
        ({}, 0, 1, 0),
        ({"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "1"}, 5, 8, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 3, 4, 1),
        ({"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}, 9, 16, 1),
        ({"RANK_ID": "x", "RANK_SIZE": ""}, 0, 1, 0),
    ],
)
def test_rank_world_and_local_rank_come_from_the_launcher(
    environment: dict[str, str], rank: int, world: int, local: int
) -> None:
    identity = detect("r", environment)
    assert (identity.rank, identity.world_size, identity.local_rank) == (rank, world, local)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"VC_JOB_NAME": "llama-sft"}, "llama-sft"),
        ({"SLURM_JOB_NAME": "my job/1"}, "my-job-1"),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "pretrain-3"}, "pretrain"),
        ({"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "pretrain-3-x7k2p"}, "pretrain"),
        ({"MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118"}, "train-node1-8118"),
        ({"MS_SCHED_HOST": "10.0.0.7", "MS_SCHED_PORT": "8118"}, "train-10.0.0.7-8118"),
        ({}, "train-node1"),
        ({"JOB_NAME": "训练"}, "run-e4eebbaf"),
        ({"JOB_NAME": "测试-1"}, "1-a127d210"),
        ({"JOB_NAME": "x" * 100}, "x" * 63),
    ],
)
def test_the_run_has_a_name_that_all_ranks_share(environment: dict[str, str], name: str) -> None:
    assert run_name(environment, "node1") == name


def test_a_configured_name_goes_first() -> None:
    assert detect("mine", {"VC_JOB_NAME": "theirs"}).run == "mine"


def test_coordinates_that_nobody_knows_stay_empty() -> None:
    assert set(detect("r", {}).info().values()) >= {""}
    assert detect("r", {}).dp_rank == ""


def test_msruns_scheduler_is_recognised() -> None:
    assert is_scheduler({"MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    assert not is_scheduler({"MS_ROLE": "MS_WORKER"})
