"""Which checkpoint ``ckpt_path`` means: a path, or ``"newest"``, decided by rank 0 for all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_swift.checkpoint.commit import locate
from lightning_swift.checkpoint.layout import Manifest, RunRecord, read_manifest
from lightning_swift.checkpoint.newest import find_newest
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointNotFoundError, ConfigurationError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["NEWEST", "NothingToRestore", "count_as_saved", "restarted", "run_of", "source_of"]

NEWEST = "newest"


class NothingToRestore(dict[str, Any]):
    """What a strategy hands to Lightning when there is nothing to resume from.

    Lightning reads the version and then skips every step of restoring when the checkpoint is false, so hooks such as
    ``on_load_checkpoint`` are not called with an empty one.
    """

    def __init__(self) -> None:
        super().__init__({"pytorch-lightning_version": lightning.__version__})

    def __bool__(self) -> bool:
        return False


def source_of(trainer: Trainer, checkpoint_path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to read; None if ``"newest"`` was asked for in a fit and there is none yet. A collective call.

    Raises:
        CheckpointNotFoundError: There is nothing at the path, or nothing to evaluate.
        ConfigurationError: ``"newest"`` without a checkpoint callback.
    """
    ranks = Ranks.current()
    with Together(ranks, "looking for the checkpoint", Path(checkpoint_path)) as step:
        if ranks.rank == 0:
            newest = str(checkpoint_path) == NEWEST and not os.path.lexists(checkpoint_path)
            step.value = _newest(trainer) if newest else locate(Path(os.path.abspath(checkpoint_path)))
    source: Path | None = step.values[0]
    # Lightning reports this path and protects it from retention; it still has the word "newest".
    trainer._checkpoint_connector._ckpt_path = None if source is None else str(source)
    return source


def run_of(trainer: Trainer, source: Path, manifest: Manifest) -> RunRecord | None:
    """The run that a fit from ``source`` continues; None if it starts a branch. A collective call.

    The run goes on unless it has newer checkpoints. Then this is a branch from an earlier step, and a run of its own:
    otherwise ``"newest"`` would return to the abandoned steps.
    """
    ranks = Ranks.current()
    with Together(ranks, "looking for newer checkpoints", source) as step:
        if ranks.rank == 0:
            newest = find_newest(list(dict.fromkeys([source.parent, *_directories(trainer)])))
            step.value = newest is None or not _is_ahead(read_manifest(newest), manifest)
    if step.values[0]:
        return manifest.run
    rank_zero_info(f"The run of {source} has newer checkpoints: this fit counts as a new run, a branch of that one.")
    return None


def _is_ahead(newest: Manifest, manifest: Manifest) -> bool:
    return newest.run.id == manifest.run.id and newest.global_step > manifest.global_step


def _directories(trainer: Trainer) -> list[Path]:
    return [Path(d) for c in trainer.checkpoint_callbacks if (d := getattr(c, "dirpath", None))]


def _newest(trainer: Trainer) -> Path | None:
    directories = _directories(trainer)
    if not directories:
        raise ConfigurationError(
            'ckpt_path="newest" looks in the directories of checkpoint callbacks, and the Trainer has none.',
            fix="Add ShardedCheckpoint(dirpath=...) to the callbacks, or name a path.",
        )
    newest = find_newest(directories)
    places = ", ".join(map(str, directories))
    if newest is None and trainer.state.fn != TrainerFn.FITTING:
        raise CheckpointNotFoundError("there is no whole checkpoint.", where=places, fix="Name the path of one.")
    if newest is None:
        rank_zero_info(f"There is no checkpoint in {places} yet: training starts from the beginning.")
    else:
        rank_zero_info(f"The newest whole checkpoint is {newest}.")
    return newest


def restarted(meta: dict[str, Any]) -> dict[str, Any]:
    """What is left to restore in a fit from weights alone: no loops, schedulers or callbacks."""
    kept = {key: value for key, value in meta.items() if key not in {"loops", "callbacks", "epoch", "global_step"}}
    # Lightning insists on the entry; an empty list restores no scheduler.
    return {**kept, "lr_schedulers": []}


def count_as_saved(trainer: Trainer) -> None:
    """Tell the checkpoint callbacks that the step at which a fit begins has been saved.

    They do not restore it themselves. With ``accumulate_grad_batches`` they would save that step again after the
    first microbatch: in the middle of an accumulation, whose gradients no checkpoint holds.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step
