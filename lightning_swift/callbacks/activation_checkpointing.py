"""The ``ActivationCheckpointing`` callback: less memory for activations, at the price of computing them again."""

from __future__ import annotations

from typing import Any, cast

import lightning as L
from typing_extensions import override

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.checkpointing import (
    CheckpointingMode,
    CheckpointingSettings,
    apply_checkpointing,
    remove_checkpointing,
)

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(L.Callback):
    """Recompute the activations of transformer blocks in the backward pass instead of keeping them.

    Gradients are bitwise those of a run without it. Acts in training only, keeps parameter names and classes, turns
    the KV cache off while training, and is taken off the model when the run ends. The strategies of this package
    apply it before compile and sharding; under every other strategy it is applied when the fit starts.

    Args:
        mode: ``"full"`` keeps only block inputs (least memory, about one more forward pass of time);
            ``"selective"`` also keeps the outputs of matrix products and attention (little extra time);
            ``"every_n"`` is full on every ``every_n``-th block.
        every_n: Distance of the checkpointed blocks in mode ``"every_n"``.
        blocks: Class names of the modules to checkpoint, such as ``["LlamaDecoderLayer"]``; by default the repeated
            blocks that the model itself declares or that are found in it.

    Raises:
        ConfigurationError: At construction for a wrong value; when the fit starts for unknown class names, a model
            without repeated blocks, or blocks that something else checkpoints already.
    """

    def __init__(self, mode: CheckpointingMode = "full", *, every_n: int = 2, blocks: list[str] | None = None) -> None:
        self.settings = CheckpointingSettings(
            mode=mode,
            every_n=every_n if mode == "every_n" else 1,
            blocks=None if blocks is None else _names(blocks),
        )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        callbacks: list[L.Callback] = cast(Any, trainer).callbacks
        if sum(isinstance(callback, ActivationCheckpointing) for callback in callbacks) > 1:
            raise ConfigurationError(
                "more than one ActivationCheckpointing callback.", where="Trainer(callbacks=...)", fix="Keep one."
            )
        # Our strategies know the right place in the order of transforms, and read this when they set the model up.
        if hasattr(trainer.strategy, "activation_checkpointing"):
            trainer.strategy.activation_checkpointing = self.settings

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Where the strategy has applied it already this finds nothing left to do.
        apply_checkpointing(pl_module, self.settings)

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if hasattr(trainer.strategy, "activation_checkpointing"):
            trainer.strategy.activation_checkpointing = None
        remove_checkpointing(pl_module)

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Lightning calls no teardown of callbacks after an exception.
        remove_checkpointing(pl_module)


def _names(blocks: object) -> tuple[str, ...]:
    # A string is an iterable of letters: leave it to the settings to refuse.
    return cast(tuple[str, ...], blocks if isinstance(blocks, str) else tuple(cast(list[str], blocks)))
