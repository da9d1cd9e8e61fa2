"""SIGKILL of either rank at every point of a save: the previous checkpoint or the new one is found, never a mixture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_swift.callbacks.sharded_checkpoint import ShardedCheckpoint
from lightning_swift.checkpoint.commit import (
    FAULTPOINTS,
    POINT_BEFORE_RETENTION,
    POINT_BETWEEN_RENAMES,
    POINT_MIDDLE_OF_DATA,
    locate,
)
from lightning_swift.checkpoint.faults import FAULT_VARIABLE
from tests.checkpoint.runs import Scheduled, digests, fit, mean_losses
from tests.faults.saving import content, newest_step, save_step, save_two
from tests.harness.ranks import RanksFailed, run_ranks

# Rank 1 passes the points of the commit without taking part in it, so there only the time of its death differs.
COMMITTED = {"after-rename", POINT_BEFORE_RETENTION}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", [p for p in FAULTPOINTS if p != POINT_BETWEEN_RENAMES])
def test_kill_during_a_save_under_a_new_name(point: str, rank: int, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"exit code -9"):
        run_ranks(save_two, 2, (tmp_path, "second.ckpt", f"{point}:{rank}:kill"))
    step = newest_step(tmp_path)
    if rank == 0:
        assert step == (2 if point in COMMITTED else 1)
    # First.ckpt has not been touched unless retention was allowed to begin, and that is after the commit.
    assert content(tmp_path / "first.ckpt") == 1 if (tmp_path / "first.ckpt").exists() else step == 2
    run_ranks(save_step, 2, (tmp_path / "second.ckpt", 3))
    assert newest_step(tmp_path) == 3
    assert set(names(tmp_path)) <= {"first.ckpt", "second.ckpt"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", [p for p in FAULTPOINTS if p != POINT_BEFORE_RETENTION])
def test_kill_during_a_save_under_the_same_name(point: str, rank: int, tmp_path: Path) -> None:
    if (point, rank) == (POINT_BETWEEN_RENAMES, 1):
        pytest.skip("only rank 0 renames")
    with pytest.raises(RanksFailed, match=r"exit code -9"):
        run_ranks(save_two, 2, (tmp_path, "first.ckpt", f"{point}:{rank}:kill"))
    step = newest_step(tmp_path)
    assert content(locate(tmp_path / "first.ckpt")) == step
    if rank == 0:
        assert step == (2 if point in COMMITTED else 1)
    run_ranks(save_step, 2, (tmp_path / "first.ckpt", 3))
    assert newest_step(tmp_path) == 3
    assert names(tmp_path) == ["first.ckpt"]


class KillAtStep(L.Callback):
    """Arms a fault before the save of one step."""

    def __init__(self, step: int, fault: str) -> None:
        self.step, self.fault = step, fault

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            os.environ[FAULT_VARIABLE] = self.fault


def train(folder: Path, fault: str | None) -> tuple[list[float], dict[str, str], int]:
    """Save every third step and keep one; ``fault`` strikes the second save."""
    callbacks: list[L.Callback] = [ShardedCheckpoint(str(folder), every_n_train_steps=3, save_top_k=1)]
    if fault is not None:
        callbacks.insert(0, KillAtStep(6, fault))
    module = Scheduled(layers=1)
    trainer = fit(module, steps=9, ckpt_path="newest", callbacks=callbacks, enable_checkpointing=True)
    return mean_losses(module), digests(trainer), len(module.losses)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, str], int]:
    return run_ranks(train, 2, (tmp_path_factory.mktemp("whole"), None))


@pytest.mark.parametrize(
    ("point", "rank", "found"), [(POINT_MIDDLE_OF_DATA, 1, 3), ("before-rename", 0, 3), (POINT_BEFORE_RETENTION, 0, 6)]
)
def test_a_killed_training_resumes_as_if_nothing_had_happened(
    point: str, rank: int, found: int, undisturbed: tuple[list[float], dict[str, str], int], tmp_path: Path
) -> None:
    losses, state, steps = undisturbed
    assert steps == 9
    with pytest.raises(RanksFailed, match=r"exit code -9"):
        run_ranks(train, 2, (tmp_path / "killed", f"{point}:{rank}:kill"))
    later, resumed, steps = run_ranks(train, 2, (tmp_path / "killed", None))
    assert steps == 9 - found
    assert later == losses[found:]
    assert resumed == state
