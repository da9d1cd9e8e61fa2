"""The optimizer and learning rate schedule of :class:`~lightning_swift.models.causal_lm.CausalLM`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.settings import OptimizerName

__all__ = ["OptimizerSettings", "Schedule", "build_optimizer", "build_scheduler"]

Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]
# Schedules that have an end and so need to know how many steps there will be.
_FINITE = {"linear", "cosine"}
_NAMES = {"constant": "constant_with_warmup"}


@dataclass(frozen=True)
class OptimizerSettings:
    """Checked values; see :class:`~lightning_swift.models.causal_lm.CausalLM` for their meaning."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    warmup: int | float
    schedule: Schedule
    name: OptimizerName = "adamw"

    def __post_init__(self) -> None:
        self._check("lr", self.lr, self.lr > 0, "above 0")
        self._check("weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        self._check("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1")
        self._check("eps", self.eps, self.eps > 0, "above 0")
        share = 0.0 <= self.warmup < 1.0 if isinstance(self.warmup, float) else self.warmup >= 0
        self._check("warmup", self.warmup, share, "a number of steps (int) or a share of all steps (float below 1)")
        names = get_args(OptimizerName)
        self._check("optimizer", self.name, self.name in names, f"one of {', '.join(names)}")
        known = get_args(Schedule)
        self._check("scheduler", self.schedule, self.schedule in known, f"one of {', '.join(known)}")

    def _check(self, name: str, value: object, fine: bool, allowed: str) -> None:
        if not fine:
            raise ConfigurationError(
                f"{name}={value!r} is not allowed.", where="CausalLM", fix=f"Give {name} as {allowed}."
            )


def build_optimizer(parameters: Iterable[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """The optimizer over what is trainable, without weight decay on vectors (norm weights, biases).

    Raises:
        ConfigurationError: Nothing is trainable.
    """
    trainable = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigurationError(
            "no parameter is trainable.", where="CausalLM", fix="Freeze less, or do not train this model."
        )
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr)
    adam: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        eight_bit: torch.optim.Optimizer = AdamW8bit(groups, **adam)
        return eight_bit
    return torch.optim.AdamW(groups, **adam, fused=True if settings.name == "adamw_fused" else None)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, steps: Callable[[], float]) -> Any:
    """The schedule of transformers by that name, with linear warm-up before it.

    Args:
        optimizer: What it drives, once per optimizer step.
        settings: Name and warm-up.
        steps: Number of optimizer steps of the whole fit, asked for only if it is needed.

    Raises:
        ConfigurationError: The schedule needs the number of steps and training has no end.
    """
    from transformers import get_scheduler

    total = None
    if settings.schedule in _FINITE or isinstance(settings.warmup, float):
        total = _finite(steps())
    warmup = math.ceil(settings.warmup * total) if total and isinstance(settings.warmup, float) else settings.warmup
    name = _NAMES.get(settings.schedule, settings.schedule)
    return get_scheduler(name, optimizer, num_warmup_steps=int(warmup), num_training_steps=total)


def _finite(steps: float) -> int:
    if steps < 0 or math.isinf(steps):
        raise ConfigurationError(
            "this schedule needs to know how many steps there will be, and training has no end.",
            where="CausalLM(scheduler=..., warmup=...)",
            fix="Set max_steps on the Trainer, or use scheduler='constant' with warmup as a number of steps.",
        )
    return int(steps)
