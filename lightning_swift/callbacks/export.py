"""The ``ExportForInference`` callback: at the end of a fit, a folder that is proved to be the trained model."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_swift.callbacks.merge import refuse_source, refuse_unusable
from lightning_swift.checkpoint.adapter import write_adapter
from lightning_swift.checkpoint.commit import is_checkpoint, remove
from lightning_swift.checkpoint.export import (
    ExportFormat,
    ExportReport,
    check_base,
    check_format,
    report_on,
)
from lightning_swift.checkpoint.export_live import expect_live
from lightning_swift.checkpoint.export_ranks import patient_ranks
from lightning_swift.checkpoint.export_verify import Expected, verify_folder
from lightning_swift.checkpoint.export_whole import write_whole
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import MergeDType, merge_checkpoint
from lightning_swift.checkpoint.output import fresh_folder
from lightning_swift.checkpoint.together import Together
from lightning_swift.errors import ConfigurationError, ExportError
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel, find_model, tokenizer_of
from lightning_swift.strategies._checkpoint_quantised import describe_quantised
from lightning_swift.strategies._checkpoint_state import clean
from lightning_swift.strategies._checkpointing import ShardedCheckpointing

__all__ = ["ExportForInference"]


class ExportForInference(L.Callback):
    """Export the trained model when the fit ends, and compare it with the model in memory.

    A fresh process loads the folder from its own files and computes logits for fixed tokens; they must have the bits
    of those that the trained model computed on its ranks (up to rounding where adapters were merged, blocks were
    compiled, or on an accelerator). With this package's strategies the folder is made of a checkpoint, which stays
    if the export fails; with a single device or DDP by ``save_pretrained``. The tokenizer of the LightningModule or
    its data module, chat template and generation settings go with it.

    Args:
        output: Folder to make; must not exist, or be empty, when the fit starts.
        dtype: Cast the weights; None keeps them as they are. Adapters keep their dtype anyway.
        format: ``"safetensors"``: the model, adapters merged. ``"adapter"``: the peft adapter alone.
        max_shard_size: Most bytes of tensors in one file.
        verify: Reload and compare.
        overwrite: Replace an earlier export, once the new one is verified: a folder that holds weights, config and
            tokenizer files and nothing else. Anything else is refused. Lets a script that resumes run again.

    Raises:
        ConfigurationError: At construction for a wrong value; when the fit starts for a module without exactly one
            Hugging Face model, without an adapter for ``"adapter"``, or an unsuitable strategy.
        ExportError: When the fit starts if the folder is occupied, lies in a checkpoint, or is where the model was
            loaded from; at its end, on every rank, if the export failed or does not reproduce the model. ``output`` is
            then as it was.
    """

    def __init__(
        self,
        output: str,
        *,
        dtype: MergeDType | None = "bfloat16",
        format: ExportFormat = "safetensors",
        max_shard_size: str = "5GB",
        verify: bool = True,
        overwrite: bool = False,
    ) -> None:
        self.dtype: MergeDType | None = None if format == "adapter" else dtype
        check_format(format, self.dtype)
        self.output = Path(output)
        self.format: ExportFormat = format
        self.max_shard_size = max_shard_size
        self.verify = verify
        self.overwrite = overwrite
        self.report: ExportReport | None = None

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or cast(Any, trainer).fast_dev_run:
            return
        _refuse_strategy(trainer.strategy)
        refuse_unusable(self.output, overwrite=self.overwrite)

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Everything that can be known now is said now, and not after the training.
        model = _the_model(trainer, pl_module)
        refuse_source(self.output, model)
        if self.format == "adapter":
            if model.adapters is None:
                raise ConfigurationError(
                    'the model has no adapter to export with format="adapter".', where="ExportForInference"
                )
            if self.verify:
                check_base(model.adapters)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if cast(Any, trainer).fast_dev_run:
            return
        model = _the_model(trainer, pl_module)
        merged = model.adapters is not None and self.format == "safetensors"
        quantization = describe_quantised(pl_module, clean)
        expected = (
            expect_live(pl_module, model.path, dtype=self.dtype, merged=merged, quantization=quantization)
            if self.verify
            else None
        )
        checkpoint, made = _final_checkpoint(trainer, self.output)
        with patient_ranks() as ranks:
            with Together(ranks, "exporting the model", self.output) as step:
                if ranks.rank == 0:
                    with _naming(checkpoint):
                        step.value = self._export(trainer, pl_module, model, checkpoint, expected)
            if made and checkpoint is not None and ranks.rank == 0:
                remove(checkpoint)
        report: ExportReport = step.values[0]
        self.report = report
        rank_zero_info(_line(report))

    def _export(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        model: HuggingFaceModel,
        checkpoint: Path | None,
        expected: Expected | None,
    ) -> ExportReport:
        with fresh_folder(self.output, overwrite=self.overwrite) as folder:
            self._write(folder, pl_module, model, checkpoint)
            _add_tokenizer(folder, trainer, pl_module)
            base = check_base(model.adapters) if self.format == "adapter" and self.verify else None
            verdict = None if expected is None else verify_folder(folder, expected, base=base)
            return report_on(folder, self.output, self.format, verdict)

    def _write(self, folder: Path, root: L.LightningModule, model: HuggingFaceModel, checkpoint: Path | None) -> None:
        if checkpoint is None:
            write_whole(
                root.get_submodule(model.path),
                folder,
                adapters=model.adapters,
                adapter_only=self.format == "adapter",
                dtype=self.dtype,
                max_shard_size=self.max_shard_size,
            )
            # peft's model card is an empty form; without it the folder is what a checkpoint's export is.
            (folder / "README.md").unlink(missing_ok=True)
        elif self.format == "adapter":
            write_adapter(checkpoint, folder)
        else:
            merge_checkpoint(checkpoint, folder, dtype=self.dtype, max_shard_size=self.max_shard_size)


@contextmanager
def _naming(checkpoint: Path | None) -> Iterator[None]:
    """Say where the weights are if the export fails: the training is over, and they are what it was for."""
    try:
        yield
    except ExportError as error:
        if checkpoint is None:
            raise
        kept = f"The trained weights are in {checkpoint}; try again with `lightning-swift export`."
        raise ExportError(error.what, where=error.where, fix=kept) from error


def _refuse_strategy(strategy: object) -> None:
    whole = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not (whole or isinstance(strategy, ShardedCheckpointing)):
        raise ConfigurationError(
            f"{type(strategy).__name__} leaves no rank with the whole model, nor a checkpoint to make it from.",
            where="ExportForInference",
            fix="Use a strategy of this package, a single device or DDP.",
        )


def _the_model(trainer: L.Trainer, module: L.LightningModule) -> HuggingFaceModel:
    strategy = trainer.strategy
    # Where no rank has the whole model the strategy knows what it is.
    model = strategy._saved_model() if isinstance(strategy, ShardedCheckpointing) else find_model(module)
    if model is None:
        raise ConfigurationError(
            f"{type(module).__name__} must hold exactly one Hugging Face model to be exported; it holds none, or "
            "several next to one another.",
            where="ExportForInference",
            fix="Leave the callback out; MergeShardedCheckpoint writes the weights of any module.",
        )
    return model


def _final_checkpoint(trainer: L.Trainer, output: Path) -> tuple[Path | None, bool]:
    """A checkpoint of the final weights, and whether it was made for this. A collective call.

    None with the strategies under which rank 0 has the whole model.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, ShardedCheckpointing):
        return None, False
    name = f"{output.name}-step-{trainer.global_step}-{secrets.token_hex(4)}.ckpt"
    # Rank 0 decides for all: it alone is sure to see the files.
    saved, fresh = strategy.broadcast((_saved_already(trainer), output.absolute().with_name(name)))
    if saved is not None:
        return saved, False
    trainer.save_checkpoint(fresh, weights_only=True)
    return fresh, True


def _saved_already(trainer: L.Trainer) -> Path | None:
    """A checkpoint that the run's callbacks have saved at the present step; None on ranks other than 0."""
    if not trainer.is_global_zero:
        return None
    names: list[str] = []
    for callback in trainer.checkpoint_callbacks:
        names += [getattr(callback, name, "") for name in ("last_model_path", "best_model_path")]
        names += getattr(callback, "best_k_models", {})
    paths = [Path(name) for name in names if name and is_checkpoint(Path(name))]
    return next((path for path in paths if read_manifest(path).global_step == trainer.global_step), None)


def _add_tokenizer(folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
    if (folder / "tokenizer_config.json").exists():
        return
    sources = (module, cast(Any, trainer).datamodule)
    tokenizer = next((found for source in sources if (found := tokenizer_of(source)) is not None), None)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _line(report: ExportReport) -> str:
    size = f"{report.nbytes / 1e9:.2f} GB" if report.nbytes >= 10**8 else f"{report.nbytes / 1e6:.2f} MB"
    start = f"Exported to {report.output} ({report.format}, {size})"
    if not report.verified:
        return f"{start}; not verified."
    gap = "bit for bit" if report.max_logit_gap == 0 else f"within {report.max_logit_gap:.2g}"
    return f"{start}: loaded by a fresh process it gives the trained model's logits for {report.tokens} tokens, {gap}."
