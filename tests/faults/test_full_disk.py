"""A full disk: every rank is told which path, how much was needed and how much is free; nothing earlier is lost."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from lightning_swift.checkpoint.commit import FAULTPOINTS, POINT_BEFORE_RETENTION, POINT_BETWEEN_RENAMES
from lightning_swift.checkpoint.faults import FAULT_VARIABLE
from lightning_swift.errors import CheckpointError
from tests.faults.saving import content, save_step
from tests.harness.ranks import ranks

# Points that a full disk can strike: at the others nothing is written any more.
POINTS = [p for p in FAULTPOINTS if p not in {POINT_BEFORE_RETENTION, "after-rename"}]


@ranks(2)
def test_every_rank_raises_at_every_point_and_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save_step(path, 1)
    for point in POINTS:
        for rank in (0, 1) if point in POINTS[:2] else (0,):
            os.environ[FAULT_VARIABLE] = f"{point}:{rank}:raise"
            with pytest.raises(CheckpointError, match=rf"rank {rank}, .*last\.ckpt.*no space left .* bytes are free"):
                save_step(path, 2)
            del os.environ[FAULT_VARIABLE]
            assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"], (point, rank)
            if os.environ["RANK"] == "0":
                assert (path / "manifest.json").is_file()
    save_step(path, 3)


@ranks(2)
def test_the_run_can_go_on_and_save_again(tmp_path: Path) -> None:
    os.environ[FAULT_VARIABLE] = "middle-of-data:0:raise"
    with pytest.raises(CheckpointError):
        save_step(tmp_path / "a.ckpt", 1)
    del os.environ[FAULT_VARIABLE]
    save_step(tmp_path / "a.ckpt", 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


@ranks(2)
def save_with_small_files(folder: Path) -> None:
    """The system itself refuses the bytes: files of rank 1 may not exceed a kilobyte."""
    save_step(folder / "a.ckpt", 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=r"writing failed on rank 1: .*File too large"):
        save_step(folder / "a.ckpt", 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_write_that_the_system_refuses_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    save_with_small_files(tmp_path)
    assert content(tmp_path / "a.ckpt") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ckpt"]


def test_all_points_have_different_names() -> None:
    assert len(set(FAULTPOINTS)) == len(FAULTPOINTS) == 7
    assert POINT_BETWEEN_RENAMES in FAULTPOINTS
