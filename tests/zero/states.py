"""Digests of everything that a checkpoint must bring back, under every strategy alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lightning_swift.checkpoint.pieces import Pieces
from lightning_swift.strategies._zero_state import ZeroCheckpointing
from tests.checkpoint.runs import digest

_OPTIONS = {"lr", "betas", "eps", "weight_decay"}


def whole(value: Any) -> Any:
    """All of a tensor of which this rank holds a part; anything else as it is. Collective for parts."""
    if not isinstance(value, Pieces):
        return value
    full = torch.zeros(value.shape, dtype=value.dtype)
    for box, part in value.parts():
        full[tuple(slice(start, end) for start, end in zip(box.offsets, box.ends, strict=True))] = part
    if dist.is_initialized():
        dist.all_reduce(full)
    return full


def state_digests(trainer: L.Trainer) -> dict[str, str]:
    """Every weight, master, moment, step counter and group option, by the name it is saved under.

    Options of how a step is executed are left out: they are this run's own business.
    """
    strategy: Any = trainer.strategy
    flat = {f"model.{name}": value for name, value in strategy.lightning_module_state_dict().items()}
    for number, optimizer in enumerate(trainer.optimizers):
        flat |= {f"optimizer_{number}.{name}": v for name, v in strategy.optimizer_state(optimizer).items()}
    found = comparable(flat)
    if isinstance(strategy, ZeroCheckpointing):
        # As after a save: what was read from disk to be looked at makes room again.
        strategy._partitions.release()
    return found


def comparable(flat: Mapping[str, Any]) -> dict[str, str]:
    """Digests of what every strategy must have alike, of state by its name in the checkpoint."""
    return {
        name: digest(whole(value))
        for name, value in sorted(flat.items())
        if name.rpartition(".")[2] in _OPTIONS or ".param_groups." not in name
    }


class Look(L.Callback):
    """Keeps the state that a resumed run starts from."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen = state_digests(trainer)
