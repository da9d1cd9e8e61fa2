"""Short runs that save, stop and resume, and digests of everything a checkpoint must bring back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_swift.strategies._checkpoint_state import model_state, optimizer_state
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer

# 24 samples, 8 a step: epochs of 3 steps, so that a checkpoint after 3 steps lies at an epoch's edge. In mid-epoch a
# plain DataLoader starts over from its first sample, which is Lightning's behaviour and not the checkpoint's.
STEPS_PER_EPOCH = 3


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def digest(value: Any) -> str:
    """SHA-256 of a full tensor's bytes, the text of anything else. Collective for DTensors."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous()
        data = value.reshape(-1).view(torch.uint8).numpy()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()}"
    return repr(value)


def digests(trainer: L.Trainer) -> dict[str, str]:
    """Every weight, buffer, moment and group option, by name."""
    module = trainer.lightning_module
    flat = {f"model.{name}": value for name, value in model_state(module).items()}
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        flat |= {f"optimizer_{number}.{name}": v for name, v in optimizer_state(module, optimizer).items()}
    return {name: digest(value) for name, value in sorted(flat.items())}


def batches() -> Any:
    return loader(Tokens(24), batch_size=8 // world_size(), rank=rank(), world_size=world_size())


def mean_losses(module: UserModule) -> list[float]:
    """The loss of every step, averaged over ranks as the training averages it."""
    losses = torch.tensor(module.losses, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(losses)
    return (losses / world_size()).tolist()


def fit(
    module: UserModule,
    *,
    steps: int,
    ckpt_path: str | Path | None = None,
    save: Path | None = None,
    strategy: Callable[[], Any] = lambda: FSDPBF16Strategy("32-true"),
    data: Any = None,
    **trainer_args: Any,
) -> L.Trainer:
    """Train ``module`` up to ``steps`` steps in all; save to ``save`` after the last."""
    callbacks = list(trainer_args.pop("callbacks", []))
    if save is not None:
        callbacks.append(SaveAt(save, steps))
    trainer = quiet_trainer(strategy=strategy(), max_steps=steps, callbacks=callbacks, **trainer_args)
    trainer.fit(module, batches() if data is None else data, ckpt_path=ckpt_path)
    return trainer


class SaveAt(L.Callback):
    """``trainer.save_checkpoint`` after step ``step``, at the moment ModelCheckpoint(every_n_train_steps=...) does it.

    At the end of the epoch hook Lightning 2.6 would save a state from which a run bounded by max_steps takes one
    batch too many.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path, weights_only=False)


class Scheduled(UserModule):
    """With a scheduler that changes the rate at each step."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Frozen(Scheduled):
    """The first block and the embedding do not train, and are in no group of the optimizer."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.model.embed_tokens.requires_grad_(False)
        self.model.model.layers[0].requires_grad_(False)


class Groups(UserModule):
    """Two parameter groups with different options."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 1e-4}]
        return torch.optim.AdamW(groups, lr=self.lr)


class Plain(UserModule):
    """SGD, which has no state at all."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Momentum(UserModule):
    """SGD with momentum and a decay that a trial step would turn into momentum."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.1)


class Unused(UserModule):
    """A head that never gets a gradient, so the optimizer has no state for it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        torch.manual_seed(2)
        self.head = torch.nn.Linear(7, 5)


class LoRA(UserModule):
    """Adapters of peft around the model, made by the user."""

    def configure_model(self) -> None:
        if self.model is None:
            from peft import LoraConfig, get_peft_model

            super().configure_model()
            torch.manual_seed(3)
            self.model = get_peft_model(self.model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


# Two blocks, of which one may be frozen or wrapped: more would be saved and read in the same way.
CASES: dict[str, Callable[[], UserModule]] = {
    "llama": lambda: Scheduled(layers=2),
    "tied": lambda: Scheduled("qwen3", layers=2),
    "frozen": lambda: Frozen(layers=2),
    "groups": lambda: Groups(layers=2),
    "sgd": lambda: Plain(layers=2),
    "momentum": lambda: Momentum(layers=2),
    "unused": lambda: Unused(layers=2),
    "lora": lambda: LoRA(layers=2),
}
