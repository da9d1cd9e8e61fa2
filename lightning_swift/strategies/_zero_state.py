"""Model and optimizer state of ZeRO by parameter name in the common checkpoint format, and back, at any world size.

``model.<fqn>`` of a trainable parameter is its FP32 master. What DeepSpeed keeps once for a whole flat vector (step
counters, group options) is written for each parameter in it. Nothing is gathered: see ``_checkpoint_zero``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.checkpoint.layout import Manifest
from lightning_swift.checkpoint.pieces import Pieces
from lightning_swift.errors import CheckpointMismatchError
from lightning_swift.strategies._checkpoint_file import load_file
from lightning_swift.strategies._checkpoint_state import (
    GROUPS,
    STATE,
    Index,
    LoadRequest,
    Rename,
    Request,
    by_owner,
    clean,
    common_values,
    is_state,
    on_device,
    parameter_names,
)
from lightning_swift.strategies._checkpoint_zero import Partitions, partitions_of
from lightning_swift.strategies._checkpointing import ShardedCheckpointing

__all__ = ["ZeroCheckpointing", "ZeroRequest", "zero_model_state", "zero_optimizer_state"]

_STEP = "step"
_INITIAL_RATE = "initial_lr"


class ZeroCheckpointing(ShardedCheckpointing):
    """Mixin for a strategy whose ``model`` is a DeepSpeed engine around the LightningModule."""

    _layout: tuple[Any, Partitions] | None = None

    @property
    def _partitions(self) -> Partitions:
        # One for all looks at an engine: it knows which swapped vector is in memory.
        if self._layout is None or self._layout[0] is not self.model:
            self._layout = (self.model, partitions_of(self.model))
        return self._layout[1]

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        try:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        finally:
            self._partitions.release()

    @override
    def _mesh_sizes(self) -> dict[str, int]:
        return {"dp_shard": self.world_size}

    @override
    def _model_state(self) -> dict[str, Any]:
        return zero_model_state(self._module, self._partitions, rename=self._saved_name)

    @override
    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return zero_optimizer_state(self._module, self._partitions, rename=self._saved_name)

    @override
    def _trained_names(self) -> set[str]:
        names = parameter_names(self._module, rename=self._saved_name)
        return {names[parameter] for members in self._partitions.members for parameter in members}

    @override
    def _load_request(self, optimizers: Sequence[Optimizer], stored: Index, manifest: Manifest) -> LoadRequest:
        partitions = self._partitions
        return ZeroRequest(
            self._module, partitions, stored, manifest.tied, optimizer=bool(optimizers), rename=self._saved_name
        )

    @override
    def _load_file(self, path: Path, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        partitions = self._partitions
        partitions.before_loading()
        names = parameter_names(self._module, rename=self._saved_name)
        rest = load_file(
            path,
            self._model_state(),
            [_FlatOptimizer(partitions, names)] if optimizers else [],
            strict=self._module.strict_loading,
            rename=self._saved_name,
        )
        partitions.after_loading()
        return rest


def zero_model_state(module: nn.Module, partitions: Partitions, *, rename: Rename = clean) -> dict[str, Any]:
    """The module's state by the name it is saved under; parameters as this rank's part of the whole."""
    return {rename(name): value for name, value in _values(module, partitions).items()}


def zero_optimizer_state(module: nn.Module, partitions: Partitions, *, rename: Rename = clean) -> dict[str, Any]:
    """``state.<fqn>.<key>`` and ``param_groups.<fqn>.<option>`` of every trained parameter."""
    assert partitions.inner is not None
    names = parameter_names(module, rename=rename)
    flat: dict[str, Any] = {}
    for vector, members in enumerate(partitions.members):
        group = partitions.inner.param_groups[partitions.owners[vector]]
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in members:
            name = names[parameter]
            flat |= {f"{GROUPS}{name}.{key}": value for key, value in options.items()}
            for key, value in partitions.states(vector).items():
                per_element = partitions.is_per_element(vector, value)
                flat[f"{STATE}{name}.{key}"] = (
                    partitions.state_of(parameter, key) if per_element else _portable(key, value)
                )
    return flat


class ZeroRequest(Request):
    """What to read from a checkpoint for a DeepSpeed engine, and where it goes afterwards.

    Args:
        module: The LightningModule in the engine.
        partitions: Of the engine, whose optimizer has taken no step.
        stored: Every name in the checkpoint with shape and dtype.
        tied: The checkpoint's own aliases.
        optimizer: Whether the optimizer's state is wanted.
        rename: As of :class:`Request`.
    """

    def __init__(
        self,
        module: nn.Module,
        partitions: Partitions,
        stored: Index,
        tied: Mapping[str, str],
        *,
        optimizer: bool,
        rename: Rename = clean,
    ) -> None:
        self._partitions = partitions
        partitions.before_loading()
        super().__init__(module, [], stored, tied, rename=rename)
        self._optimizer = optimizer
        if optimizer:
            own = {key.removeprefix(_PREFIX): entry for key, entry in stored.items() if key.startswith(_PREFIX)}
            self.state |= {f"{_PREFIX}{key}": value for key, value in self._placeholders(own).items()}

    @override
    def _values(self) -> dict[str, Any]:
        return _values(self.module, self._partitions)

    @override
    def _aliases(self, stored: Index, tied: Mapping[str, str]) -> dict[str, str]:
        # Two names of one parameter here; parameters that were one when they were saved are missed like any other.
        same = dict(self.module.named_parameters(remove_duplicate=False))
        owners = {self._rename(name): parameter for name, parameter in same.items()}
        found = super()._aliases(stored, tied)
        return {name: other for name, other in found.items() if owners.get(name) is owners.get(other)}

    @override
    @torch.no_grad()
    def install(self, loaded: frozenset[str]) -> None:
        self.install_extra()
        if self._optimizer:
            flat = {key.removeprefix(_PREFIX): self.state[key] for key in loaded if key.startswith(_PREFIX)}
            shared = {key: value for key, value in flat.items() if not isinstance(value, Pieces)}
            _install_shared(self._partitions, self._names, shared)
        self._partitions.after_loading()

    def _placeholders(self, stored: Index) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for vector, members in enumerate(self._partitions.members):
            owners = {self._names[parameter]: parameter for parameter in members}
            for name, keys in by_owner(stored, owners).items():
                for key in keys or (f"{GROUPS}{name}.lr",):
                    flat[key] = self._placeholder(vector, owners[name], key, name, stored.get(key))
        return flat

    def _placeholder(
        self, vector: int, parameter: Tensor, key: str, name: str, entry: tuple[torch.Size, torch.dtype] | None
    ) -> Any:
        if entry is None:
            return None
        shape, dtype = entry
        own = key.removeprefix(f"{STATE}{name}.")
        if is_state(key) and shape == self._partitions.shape(parameter):
            self._partitions.create_state(vector, own, dtype)
            return self._partitions.state_of(parameter, own)
        if shape.numel() > 1:
            raise CheckpointMismatchError(
                f"the optimizer's {key} has shape {tuple(shape)}, its parameter "
                f"{tuple(self._partitions.shape(parameter))}; ZeRO keeps states of the parameter's own shape only.",
                fix="Build the model and its adapters as they were when it was saved. If the optimizer keeps states of "
                "other shapes, resume with the strategy that saved it, or save with save_weights_only=True.",
            )
        return torch.empty(shape, dtype=dtype)


class _FlatOptimizer:
    """DeepSpeed's optimizer, filled from the state of one over whole parameters."""

    def __init__(self, partitions: Partitions, names: Mapping[Tensor, str]) -> None:
        self._partitions, self._names = partitions, names

    def group_sizes(self) -> list[int]:
        """Number of parameters in each group."""
        return [len(members) for members in self._groups()]

    def fill(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's part of ``saved``."""
        shared: dict[str, Any] = {}
        for members, old in zip(self._groups(), saved["param_groups"], strict=True):
            options = {key: value for key, value in old.items() if key != "params"}
            for (vector, parameter), number in zip(members, old["params"], strict=True):
                name = self._names[parameter]
                shared |= {f"{GROUPS}{name}.{key}": value for key, value in options.items()}
                for key, value in saved["state"].get(number, {}).items():
                    if key != _STEP and value.shape == self._partitions.shape(parameter):
                        self._partitions.create_state(vector, key, value.dtype)
                        self._partitions.state_of(parameter, key).take_from(value)
                    else:
                        shared[f"{STATE}{name}.{key}"] = value
        _install_shared(self._partitions, self._names, shared)

    def _groups(self) -> list[list[tuple[int, nn.Parameter]]]:
        groups: dict[int, list[tuple[int, nn.Parameter]]] = {}
        for vector, members in enumerate(self._partitions.members):
            groups.setdefault(self._partitions.owners[vector], []).extend((vector, p) for p in members)
        return [groups[number] for number in sorted(groups)]


def _install_shared(partitions: Partitions, names: Mapping[Tensor, str], shared: Mapping[str, Any]) -> None:
    """What there is once for a flat vector, from the values of its parameters, which must agree."""
    inner = partitions.inner
    assert inner is not None
    for vector, members in enumerate(partitions.members):
        own = [names[parameter] for parameter in members]
        group = inner.param_groups[partitions.owners[vector]]
        counters = {key: _native(key, value, inner) for key, value in common_values(STATE, own, shared).items()}
        if counters:
            partitions.states(vector).update(on_device(counters, partitions.flat(vector), group))
        options = common_values(GROUPS, own, shared)
        # Options of another optimizer class with the same states mean nothing to this one.
        group.update({key: value for key, value in options.items() if key in group or key == _INITIAL_RATE})


# DeepSpeed has one optimizer.
_PREFIX = "optimizer_0."


def _values(module: nn.Module, partitions: Partitions) -> dict[str, Any]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: partitions.whole(parameters[name]) if name in parameters else value
        for name, value in module.state_dict().items()
    }


def _portable(key: str, value: Any) -> Any:
    """Counters as torch's optimizers keep them, in which form every strategy reads them."""
    return torch.tensor(float(value)) if key == _STEP and isinstance(value, int) else value


def _native(key: str, value: Any, inner: Optimizer) -> Any:
    """Counters as this optimizer keeps them: only torch's own count in tensors."""
    counts = key == _STEP and isinstance(value, Tensor) and not type(inner).__module__.startswith("torch.")
    return int(value) if counts else value
