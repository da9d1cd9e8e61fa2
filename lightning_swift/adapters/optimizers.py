"""Keeps frozen parameters out of optimizers that were built over all of them."""

from __future__ import annotations

from torch.optim import Optimizer

__all__ = ["keep_trainable"]


def keep_trainable(optimizer: Optimizer) -> int:
    """Drop what is frozen from a user's optimizer, in place; return how many parameters were dropped.

    Groups and their options stay; groups that become empty are removed. An optimizer over trainable parameters only
    is left as it is.

    Raises:
        ConfigurationError: Nothing trainable is left.
    """
    raise NotImplementedError
