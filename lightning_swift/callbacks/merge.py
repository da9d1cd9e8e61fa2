"""The ``MergeShardedCheckpoint`` callback: a Hugging Face folder of a checkpoint at the end of a fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, cast, get_args

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swift.checkpoint.commit import is_checkpoint
from lightning_swift.checkpoint.export_ranks import patient_ranks
from lightning_swift.checkpoint.merge import MergeDType, MergeReport, merge_checkpoint
from lightning_swift.checkpoint.newest import find_newest
from lightning_swift.checkpoint.output import check_output
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointNotFoundError, ConfigurationError, ExportError
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel, find_model

__all__ = ["MergeShardedCheckpoint", "refuse_source", "refuse_unusable"]

Which = Literal["last", "best"]


class MergeShardedCheckpoint(L.Callback):
    """Merge a checkpoint of the run into one folder when the fit ends; rank 0 works, the others wait.

    Streams, so that no rank ever holds the model. The folder is not tried out: ``ExportForInference`` does that.

    Args:
        output: Folder to make; ``NAME-merged`` next to the checkpoint ``NAME.ckpt`` if None. A given folder must not
            exist, or be empty, when the fit starts.
        dtype: Cast the weights; None keeps them as they are.
        max_shard_size: Most bytes of tensors in one file.
        which: ``"last"`` is the newest checkpoint of the run; ``"best"`` the best one by what the first checkpoint
            callback monitors.
        overwrite: Replace an earlier export or merge, once the new one is whole: a folder that holds weights, config
            and tokenizer files and nothing else. Anything else is refused.

    Raises:
        ConfigurationError: At construction for a wrong value; when the fit starts if no checkpoint callback is there.
        ExportError: When the fit starts if the folder is occupied, lies in a checkpoint, or is where the model was
            loaded from; at its end, on every rank, if the merge failed.
    """

    def __init__(
        self,
        output: str | None = None,
        *,
        dtype: MergeDType | None = None,
        max_shard_size: str = "5GB",
        which: Which = "last",
        overwrite: bool = False,
    ) -> None:
        if which not in get_args(Which):
            raise ConfigurationError(f'which={which!r} is not "last" or "best".', where="MergeShardedCheckpoint")
        if dtype is not None and dtype not in get_args(MergeDType):
            raise ConfigurationError(
                f"dtype={dtype!r} is not one of {', '.join(get_args(MergeDType))}.", where="MergeShardedCheckpoint"
            )
        self.output = output
        self.dtype: MergeDType | None = dtype
        self.max_shard_size = max_shard_size
        self.which: Which = which
        self.overwrite = overwrite

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or _is_trial(trainer):
            return
        if not trainer.checkpoint_callbacks:
            raise ConfigurationError(
                "there will be no checkpoint to merge.",
                where="MergeShardedCheckpoint",
                fix="Add ShardedCheckpoint() to the callbacks.",
            )
        if self.output is not None:
            refuse_unusable(Path(self.output), overwrite=self.overwrite)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.output is not None and not _is_trial(trainer):
            refuse_source(Path(self.output), find_model(pl_module))

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The checkpoint callbacks may save until on_train_end, and Lightning calls them last.
        if _is_trial(trainer):
            return
        with patient_ranks() as ranks, Together(ranks, "merging the checkpoint", self._place(trainer)) as step:
            if ranks.rank == 0:
                step.value = self._merge(trainer)
        report: MergeReport = step.values[0]
        rank_zero_info(f"Merged {report.tensors} tensors ({report.nbytes:,} bytes, {report.dtype}) to {report.output}.")

    def _merge(self, trainer: L.Trainer) -> MergeReport:
        checkpoint = _best(trainer) if self.which == "best" else _last(trainer)
        beside = checkpoint.with_name(f"{checkpoint.name.removesuffix('.ckpt')}-merged")
        output = beside if self.output is None else Path(self.output)
        return merge_checkpoint(
            checkpoint,
            output,
            dtype=self.dtype,
            max_shard_size=self.max_shard_size,
            overwrite=self.overwrite,
        )

    def _place(self, trainer: L.Trainer) -> Path:
        return Path(self.output if self.output is not None else trainer.default_root_dir)


def refuse_unusable(output: Path, *, overwrite: bool) -> None:
    """Say before hours of training that their result could not be written. A collective call.

    Raises:
        ExportError: On every rank, if ``output`` is occupied or lies in a checkpoint, as rank 0 sees it.
    """
    ranks = Ranks.current()
    with Together(ranks, "looking at the output folder", output):
        if ranks.rank == 0:
            check_output(output, overwrite=overwrite)


def refuse_source(output: Path, model: HuggingFaceModel | None) -> None:
    """Refuse to replace the folder that the model was loaded from: it looks like an earlier export.

    Raises:
        ExportError: As said.
    """
    if model is None:
        return
    sources = [getattr(model.model.config, "_name_or_path", None)]
    sources += [config.get("base_model_name_or_path") for config in (model.adapters or {}).values()]
    if any(source and os.path.realpath(source) == os.path.realpath(output) for source in sources):
        raise ExportError(
            "the model of this fit was loaded from here, and that is not replaced.",
            where=str(output),
            fix="Name another folder.",
        )


def _is_trial(trainer: L.Trainer) -> bool:
    return bool(cast(Any, trainer).fast_dev_run)


def _last(trainer: L.Trainer) -> Path:
    directories = [Path(d) for c in trainer.checkpoint_callbacks if (d := getattr(c, "dirpath", None))]
    newest = find_newest(directories)
    if newest is None:
        raise CheckpointNotFoundError(
            "the run has left no sharded checkpoint.",
            where=", ".join(map(str, directories)) or None,
            fix="Let the checkpoint callback save at least once, with a strategy of this package.",
        )
    return newest


def _best(trainer: L.Trainer) -> Path:
    path = Path(getattr(trainer.checkpoint_callback, "best_model_path", "") or "")
    if not path.name or not is_checkpoint(path):
        raise CheckpointNotFoundError(
            f"the best checkpoint {str(path)!r} is no sharded checkpoint.",
            fix="Let the checkpoint callback monitor a value and save, with a strategy of this package.",
        )
    return path
