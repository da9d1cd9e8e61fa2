"""An ordinary Lightning ``.ckpt`` file (of one device, or DDP) as the start of a sharded run."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_swift.checkpoint.pieces import Pieces
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointCorruptError, CheckpointMismatchError, UnsafeCheckpointError
from lightning_swift.strategies._checkpoint_state import Rename, on_device

__all__ = ["FileOptimizer", "OptimizerInFile", "load_file"]


class FileOptimizer(Protocol):
    """An optimizer that takes its state from what torch's ``state_dict`` of an unsharded one has saved."""

    def group_sizes(self) -> list[int]:
        """Number of parameters in each group."""

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's part of ``saved``, whose groups have these sizes."""


def load_file(
    path: Path,
    target: Mapping[str, Any],
    optimizers: Sequence[FileOptimizer],
    *,
    strict: bool,
    rename: Rename,
    elsewhere: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Fill the module, and the optimizers if the file has their state; each rank takes its own slices.

    The file is mapped, not read: a rank's memory grows by its shards only.

    Args:
        path: The file.
        target: The tensors of the LightningModule by saved name.
        optimizers: Its optimizers, none when the model is only evaluated.
        rename: From a name in the file to the saved name.
        strict: Whether missing and unexpected names are errors.
        elsewhere: Saved names of tensors that other ranks have, which are not unexpected.

    Returns:
        The rest of the checkpoint.

    Raises:
        CheckpointMismatchError: Names, shapes or parameter groups do not correspond; nothing was touched.
        UnsafeCheckpointError: The file holds types that cannot be read safely.
        CheckpointCorruptError: It is not a checkpoint file.
    """
    with Together(Ranks.current(), "reading", path):
        checkpoint = _read(path)
        weights: dict[str, Any] = {rename(name): value for name, value in checkpoint.pop("state_dict").items()}
        _compare(path, {n: w for n, w in weights.items() if n in target or n not in elsewhere}, target, strict=strict)
        states = checkpoint.pop("optimizer_states", None)
        if optimizers and states is not None:
            _compare_groups(path, states, optimizers)
        for name in weights.keys() & target.keys():
            if isinstance(target[name], Tensor):
                _copy(target[name], weights[name])
        for optimizer, state in zip(optimizers, states or (), strict=False):
            optimizer.fill(state)
    # Lightning tells a checkpoint of weights alone from a full one by this entry.
    return checkpoint if states is None else {**checkpoint, "optimizer_states": []}


def _read(path: Path) -> dict[str, Any]:
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            "the file holds a type that is not on torch's list of safe types; nothing was run.",
            where=str(path),
            fix="If you trust it, allow the type with torch.serialization.add_safe_globals.",
        ) from error
    except RuntimeError as error:
        raise CheckpointCorruptError(f"not a checkpoint file ({error}).", where=str(path)) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointCorruptError(
            "not a Lightning checkpoint: it has no state_dict.",
            where=str(path),
            fix="To start from plain weights, load them in the LightningModule.",
        )
    return checkpoint


def _compare(path: Path, weights: Mapping[str, Any], target: Mapping[str, Any], *, strict: bool) -> None:
    missing, unexpected = sorted(target.keys() - weights.keys()), sorted(weights.keys() - target.keys())
    wrong = [
        f"{name} ({tuple(weights[name].shape)} in the checkpoint, {tuple(target[name].shape)} here)"
        for name in sorted(target.keys() & weights.keys())
        if isinstance(target[name], Tensor) and target[name].shape != weights[name].shape
    ]
    if wrong or (strict and (missing or unexpected)):
        raise CheckpointMismatchError(
            f"the checkpoint does not fit the model; nothing was loaded: missing {missing[:8]}, unexpected "
            f"{unexpected[:8]}, of another shape {wrong[:8]}.",
            where=str(path),
            fix="Build the model as it was when the file was saved, or set strict_loading=False.",
        )


def _compare_groups(path: Path, states: Sequence[Any], optimizers: Sequence[FileOptimizer]) -> None:
    saved = [[len(group["params"]) for group in state["param_groups"]] for state in states]
    here = [optimizer.group_sizes() for optimizer in optimizers]
    if saved != here:
        raise CheckpointMismatchError(
            f"the optimizers of the checkpoint have parameter groups of {saved} parameters, those here {here}; "
            "nothing was loaded.",
            where=str(path),
            fix="Build the optimizers as they were, or save the file again with save_weights_only=True.",
        )


class OptimizerInFile:
    """One of torch's optimizers over parameters that may be sharded."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def group_sizes(self) -> list[int]:
        """Number of parameters in each group."""
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's part of ``saved``."""
        for group, old in zip(self._optimizer.param_groups, saved["param_groups"], strict=True):
            for parameter, number in zip(group["params"], old["params"], strict=True):
                if number in saved["state"]:
                    state = {key: _like(parameter, value) for key, value in saved["state"][number].items()}
                    self._optimizer.state[parameter] = on_device(state, parameter, group)
            group.update({key: value for key, value in old.items() if key in group and key != "params"})


def _like(parameter: Tensor, value: Any) -> Any:
    """A copy of a full tensor, laid out as its parameter if it has the same shape."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone()
    target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    _copy(target, value)
    return target


@torch.no_grad()
def _copy(target: Tensor, full: Tensor) -> None:
    if isinstance(target, DTensor):
        # src_data_rank=None: every rank has the file, so each slices for itself and nothing is sent.
        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(full.to_local())
    elif isinstance(target, Pieces):
        target.take_from(full)
    else:
        target.copy_(full)
