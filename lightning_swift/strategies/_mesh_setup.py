"""What the mesh engine does to a module and its Trainer around the transforms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from lightning_swift.errors import ModelError

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["evaluate_under_no_grad", "move_parameters", "move_the_rest", "refuse_empty"]


def refuse_empty(module: pl.LightningModule) -> None:
    """Refuse a model that still has a tensor without data.

    Raises:
        ModelError: A parameter or buffer is on the meta device.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ModelError(
                "the tensor is on the meta device and nothing is known to fill it with.",
                where=name,
                fix="Build pretrained models with lightning_swift.lazy_pretrained, and others on a real device.",
            )


def move_parameters(module: nn.Module, device: torch.device) -> None:
    """Parameters with values, where no group moves them. Ties stay, and the empty ones are filled where they belong."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def move_the_rest(module: pl.LightningModule, device: torch.device) -> None:
    """Buffers and parameterless children (metrics), which no group moves, and Lightning's own note of the device."""
    for part in module.modules():
        if next(part.parameters(), None) is None:
            part.to(device)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = buffer.to(device)
    module._device = device


def evaluate_under_no_grad(trainer: pl.Trainer) -> None:
    """Gathered parameters made under ``inference_mode`` could not be trained on afterwards (pytorch 197327)."""
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False
