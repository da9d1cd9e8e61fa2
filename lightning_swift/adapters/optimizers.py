"""Keeps frozen parameters out of optimizers that were built over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from lightning_swift.errors import ConfigurationError

__all__ = ["keep_trainable"]

# What torch's schedulers keep per parameter group, in lists as long as the optimizer's.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")


def keep_trainable(optimizer: Optimizer, schedulers: Iterable[object] = ()) -> int:
    """Drop what is frozen from a user's optimizer, in place; return how many parameters were dropped.

    Groups and their options stay; groups that become empty are removed. An optimizer over trainable parameters only
    is left as it is.

    Args:
        optimizer: Of torch, before its first step.
        schedulers: All learning rate schedulers of the fit. Those of this optimizer forget the removed groups too;
            otherwise they would give the remaining ones the rates of others.

    Raises:
        ConfigurationError: Nothing trainable is left.
    """
    groups = optimizer.param_groups
    dropped = [p for group in groups for p in group["params"] if not p.requires_grad]
    if not dropped:
        return 0
    for parameter in dropped:
        optimizer.state.pop(parameter, None)
    emptied = set()
    for number, group in enumerate(groups):
        had = bool(group["params"])
        group["params"] = [p for p in group["params"] if p.requires_grad]
        if had and not group["params"]:
            emptied.add(number)
    if len(emptied) == len(groups):
        raise ConfigurationError(
            f"no parameter of the optimizer ({type(optimizer).__name__}) is trainable: all {len(dropped)} are frozen.",
            where="configure_optimizers",
            fix="Build it over self.parameters(), which has the adapters, or freeze less.",
        )
    if emptied:
        for scheduler in schedulers:
            _forget(scheduler, optimizer, len(groups), emptied)
        groups[:] = [group for number, group in enumerate(groups) if number not in emptied]
    return len(dropped)


def _forget(scheduler: Any, optimizer: Optimizer, count: int, emptied: set[int]) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _forget(inner, optimizer, count, emptied)
    if getattr(scheduler, "optimizer", None) is not optimizer:
        return
    for name in _PER_GROUP:
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and len(values) == count:
            setattr(scheduler, name, [value for number, value in enumerate(values) if number not in emptied])
