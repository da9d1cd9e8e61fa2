"""ModelCheckpoint with the defaults of a run that shall be resumed: the newest k by step, and the last step too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_swift.checkpoint.layout import Manifest, read_manifest
from lightning_swift.errors import CheckpointError, ConfigurationError

__all__ = ["ShardedCheckpoint"]


class ShardedCheckpoint(ModelCheckpoint):
    """Saves ``step-N.ckpt`` regularly and at the end of a fit, and keeps the newest or the best ones.

    A checkpoint that falls out of the kept ones is deleted only after the new one has been committed. Order goes by
    step, never by file times. Lightning never deletes the checkpoint that a fit has resumed from while that fit lasts:
    after a resume one more than ``save_top_k`` can stay, until the next resume counts it among the others.

    Resume with ``trainer.fit(..., ckpt_path="newest")``. The newest is found by names and sizes of its files: what an
    interrupted save has left, and a checkpoint with a missing or cut file, is passed over for the one before. Hashes
    are compared when it is loaded. If a byte of the newest has changed, the fit ends with an error that names the
    file, and never goes on from an older one by itself: name that one in ``ckpt_path``, or delete the damaged one.

    To keep the newest for resuming and the best for use, give the Trainer two of them with different directories.

    Args:
        dirpath: Directory of the checkpoints; ``checkpoints`` below the Trainer's ``default_root_dir`` if None. Other
            than with ModelCheckpoint it does not depend on the logger's version, so that the next start of the same
            script finds it.
        every_n_train_steps: Optimizer steps between two saves; None saves after each epoch instead.
        save_top_k: How many to keep; -1 keeps all.
        monitor: Logged value that decides which are kept; None keeps the newest.
        mode: Whether a low (``"min"``) or a high (``"max"``) value of ``monitor`` is good.
        save_weights_only: Leave out optimizers, loops and callbacks. A fit can start from such a checkpoint but not
            continue from it.
        save_at_end: Save the last step of a fit if it has not been saved yet.

    Raises:
        ConfigurationError: ``save_top_k`` is 0 or below -1, or ``every_n_train_steps`` is below 1.

    Example::

        Trainer(callbacks=[ShardedCheckpoint(every_n_train_steps=100, save_top_k=3)])
    """

    def __init__(
        self,
        dirpath: str | None = None,
        *,
        every_n_train_steps: int | None = None,
        save_top_k: int = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_weights_only: bool = False,
        save_at_end: bool = True,
    ) -> None:
        if save_top_k == 0 or save_top_k < -1:
            raise ConfigurationError(
                f"save_top_k={save_top_k} keeps nothing.",
                where="ShardedCheckpoint",
                fix="Use a number of checkpoints to keep, or -1 for all; leave the callback out to save none.",
            )
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ConfigurationError(
                f"every_n_train_steps={every_n_train_steps} is not a number of steps.",
                where="ShardedCheckpoint",
                fix="Use 1 or more, or leave it out to save after each epoch.",
            )
        super().__init__(
            dirpath=dirpath,
            filename="step-{step}",
            monitor="step" if monitor is None else monitor,
            mode="max" if monitor is None else mode,
            save_top_k=save_top_k,
            save_weights_only=save_weights_only,
            every_n_train_steps=every_n_train_steps,
            auto_insert_metric_name=False,
        )
        self.save_at_end = save_at_end

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir).absolute() / "checkpoints")
        with warnings.catch_warnings():
            # Lightning warns of a directory in use; here that is how a run is resumed, and nothing is overwritten.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.monitor == "step" and self.save_top_k > 0 and trainer.ckpt_path is not None:
            self._adopt(trainer, Path(trainer.ckpt_path))

    def _adopt(self, trainer: pl.Trainer, resumed_from: Path) -> None:
        """Count checkpoints of the resumed run that its last state does not know of, so that they are kept in bounds.

        A run that dies between a commit and the deletion of an older checkpoint leaves one too many.
        """
        found: list[tuple[int, str]] = trainer.strategy.broadcast(self._of_run(resumed_from))
        self.best_k_models |= {path: torch.tensor(step) for step, path in found[-self.save_top_k :]}
        for path in [path for _, path in found[: -self.save_top_k]]:
            self.best_k_models.pop(path, None)
            trainer.strategy.remove_checkpoint(path)
        if self.best_k_models:
            self.kth_best_model_path = min(self.best_k_models, key=lambda path: int(self.best_k_models[path]))
            self.kth_value = self.best_k_models[self.kth_best_model_path]

    def _of_run(self, resumed_from: Path) -> list[tuple[int, str]]:
        """Step and path of this directory's checkpoints of the run, oldest first; none if it has newer ones."""
        current = _manifest(resumed_from)
        if current is None or self.dirpath is None:
            return []
        paths = [path for path in Path(self.dirpath).glob("step-*.ckpt") if not path.is_symlink()]
        known = [(m.global_step, str(path)) for path in paths if (m := _manifest(path)) and m.run.id == current.run.id]
        return sorted(known) if all(step <= current.global_step for step, _ in known) else []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        # What Lightning 2.6 saves later, in the hooks of the epoch's end, does not resume exactly: a run bounded by
        # max_steps takes one batch too many, and one that stopped in mid-epoch skips the rest of the epoch.
        after_epoch = self._every_n_epochs >= 1 and self.monitor == "step" and trainer.is_last_batch
        if after_epoch or (self.save_at_end and trainer.global_step == trainer.max_steps):
            self._save_if_new(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        if self.save_at_end:
            self._save_if_new(trainer)

    def _save_if_new(self, trainer: pl.Trainer) -> None:
        candidates = self._monitor_candidates(trainer)
        if self.monitor in candidates and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, candidates)


def _manifest(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
