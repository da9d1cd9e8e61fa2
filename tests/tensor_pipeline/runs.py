"""One training run as users have it (accumulation, clipping, schedule, validation), and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness.models import Tokens, UserModule, loader, quiet_trainer

STEPS = 4
ROWS = 8
# Enough where what is looked at shows in each step: accumulation, clipping, a schedule that moves, a validation.
SHORT = {"max_steps": 2}


class FullModule(UserModule):
    """Two parameter groups and a cosine schedule; loaders that ask the Trainer for their share of the data."""

    def __init__(self, kind: str = "llama", **config: Any) -> None:
        super().__init__(kind, **config)
        self.rows = ROWS

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
        ]
        # Of a gradient that is all rounding, Adam's usual 1e-8 would make a whole step in either direction.
        optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def share(self, dataset: Tokens) -> DataLoader[Any]:
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        ranks = kwargs["num_replicas"]
        return loader(dataset, batch_size=self.rows // ranks, rank=kwargs["rank"], world_size=ranks)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.share(Tokens())

    def val_dataloader(self) -> DataLoader[Any]:
        return self.share(Tokens(16, seed=2))


@dataclass
class Numbers:
    """Of one run; losses of each micro-batch, norms before clipping and learning rates of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)

    def first(self, steps: int) -> Numbers:
        """Those of the first ``steps``, an even number: :func:`train` validates after every second one."""
        return Numbers(
            self.losses[: 2 * steps], self.norms[:steps], self.rates[:steps], self.validation[: 1 + steps // 2]
        )

    def flat(self) -> list[float]:
        return [*self.losses, *self.norms, *self.rates, *self.validation]


class Observer(L.Callback):
    """Records :class:`Numbers` through what any user can see."""

    def __init__(self) -> None:
        self.numbers = Numbers()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.numbers.losses.append(float(trainer.logged_metrics["loss"]))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        strategy = trainer.strategy
        if hasattr(strategy, "gradient_norm"):
            norm: Tensor = strategy.gradient_norm()
        else:
            norm = nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
        self.numbers.norms.append(float(norm))
        self.numbers.rates.append(optimizer.param_groups[0]["lr"])

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.numbers.validation.append(float(trainer.callback_metrics["val_loss"]))


def train(module: L.LightningModule, strategy: Any = "auto", **kwargs: Any) -> Numbers:
    """Four optimizer steps of two micro-batches each, clipped, with the sanity check and two validation runs."""
    observer = Observer()
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "val_check_interval": 4,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
    }
    path = kwargs.pop("ckpt_path", None)
    callbacks = [observer, *kwargs.pop("callbacks", [])]
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **{**settings, **kwargs})
    trainer.fit(module, ckpt_path=path)
    return observer.numbers


def plain(kind: str = "llama", *, max_steps: int = STEPS, **config: Any) -> Numbers:
    """The same run in one process with Lightning alone."""
    return train(FullModule(kind, **config), devices=1, max_steps=max_steps)
