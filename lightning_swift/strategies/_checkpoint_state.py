"""Model and optimizer state by parameter name, taken and put back without a step of the optimizer.

torch's ``get_optimizer_state_dict`` makes a trial step with zero gradients on an optimizer that has no state yet. That
invents state for parameters that never had a gradient, counts a step, and runs code of optimizers that may not
stand it; so the same names are formed here from ``optimizer.state`` itself. Only an optimizer whose state has
other shapes than its parameters (a factored one) is still started that way, for its layout is not known otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_swift.checkpoint.layout import MODEL_PREFIX
from lightning_swift.errors import CheckpointError, CheckpointMismatchError

__all__ = [
    "GROUPS",
    "STATE",
    "Index",
    "LoadRequest",
    "Rename",
    "Request",
    "by_owner",
    "clean",
    "common_values",
    "is_state",
    "model_state",
    "on_device",
    "optimizer_state",
    "parameter_names",
    "tied_names",
    "without_aliases",
]

Index = Mapping[str, tuple[torch.Size, torch.dtype] | None]
Rename = Callable[[str], str]
STATE = "state."
GROUPS = "param_groups."
# How a step is executed, not what it computes: this run's hardware decides, not that of the run that saved.
_HOW_TO_RUN = {"foreach", "fused", "capturable", "differentiable"}


def clean(name: str) -> str:
    """A parameter name without the marks that torch.compile leaves in it."""
    return name.replace("_orig_mod.", "")


def model_state(module: nn.Module, *, rename: Rename = clean) -> dict[str, Any]:
    """The module's state by the name it is saved under; tensors share the memory of the parameters."""
    return {rename(name): value for name, value in module.state_dict().items()}


def tied_names(module: nn.Module, *, rename: Rename = clean) -> dict[str, str]:
    """Alias to canonical name, for every parameter that the module reaches by several names."""
    canonical = {id(parameter): rename(name) for name, parameter in module.named_parameters()}
    return {
        rename(name): canonical[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if rename(name) != canonical[id(parameter)]
    }


def parameter_names(module: nn.Module, *, rename: Rename = clean) -> dict[Tensor, str]:
    """Parameter to canonical name. Copies of one parameter (on two stages of a pipeline) may share a name."""
    return {parameter: rename(name) for name, parameter in module.named_parameters()}


def optimizer_state(module: nn.Module, optimizer: Optimizer, *, rename: Rename = clean) -> dict[str, Any]:
    """``state.<fqn>.<key>`` and ``param_groups.<fqn>.<option>`` of every parameter of ``optimizer``.

    Raises:
        CheckpointError: A parameter is not one of the module's, or an entry is a nested structure of tensors.
    """
    names = parameter_names(module, rename=rename)
    flat: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = _name(names, parameter)
            flat |= {f"{GROUPS}{name}.{key}": value for key, value in options.items()}
            # get: the mapping is a defaultdict, and a look must not add an entry.
            state = optimizer.state.get(parameter, {})
            flat |= {f"{STATE}{name}.{key}": _entry(name, key, value) for key, value in state.items()}
    return flat


def without_aliases(weights: Mapping[str, Any], tied: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """``weights`` with every tied tensor once, and the aliases that were left out."""
    dropped = {alias: name for alias, name in tied.items() if alias in weights and name in weights}
    return {name: value for name, value in weights.items() if name not in dropped}, dropped


class LoadRequest(Protocol):
    """What to read from a checkpoint, and where it goes afterwards.

    Attributes:
        state: Name to tensor or placeholder, for :func:`~lightning_swift.checkpoint.sharded.load_into`.
    """

    state: dict[str, Any]

    def install(self, loaded: frozenset[str]) -> None:
        """Put what was read where it belongs; tensors have been filled in place already.

        Args:
            loaded: The names of ``state`` that were read.
        """


class Request:
    """What to read from a checkpoint for a module and its optimizers, and where it goes afterwards.

    Args:
        module: The module to fill; its tensors are filled in place.
        optimizers: Optimizers that have taken no step.
        stored: Every name in the checkpoint with shape and dtype.
        tied: The checkpoint's own aliases (``Manifest.tied``).
        rename: From a name in ``module`` to the name it is saved under. Several tensors of the module may have one
            such name (copies of a tied weight on two stages): each of them is filled.

    Attributes:
        state: Name to tensor or placeholder, for :func:`~lightning_swift.checkpoint.sharded.load_into`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        stored: Index,
        tied: Mapping[str, str],
        *,
        rename: Rename = clean,
    ) -> None:
        self.module = module
        self.optimizers = list(optimizers)
        self._rename = rename
        self._names = parameter_names(module, rename=rename)
        self._tied_here = tied_names(module, rename=rename)
        self._weights: dict[str, Any] = {}
        self._twins: list[tuple[Tensor, str]] = []
        self._extra: dict[str, str] = {}
        for known_as, value in self._values().items():
            name = rename(known_as)
            if known_as.endswith("_extra_state"):
                self._extra[known_as] = name
            if name in self._weights and isinstance(value, Tensor):
                self._twins.append((value, name))
            else:
                self._weights[name] = value
        self._copies = self._aliases(stored, tied)
        self.state: dict[str, Any] = {
            f"{MODEL_PREFIX}{name}": value for name, value in self._weights.items() if name not in self._copies
        }
        for number, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer_{number}."
            own = {key.removeprefix(prefix): entry for key, entry in stored.items() if key.startswith(prefix)}
            flat = _placeholders(module, self._names, optimizer, own)
            self.state |= {f"{prefix}{key}": value for key, value in flat.items()}

    def _values(self) -> dict[str, Any]:
        """What is to be filled, by the module's own names."""
        return self.module.state_dict()

    def _aliases(self, stored: Index, tied: Mapping[str, str]) -> dict[str, str]:
        """Name to the name it is stored under, for what is tied here or was tied when it was saved."""
        here = self._tied_here
        reverse = {name: alias for alias, name in (*tied.items(), *here.items())}
        copies = {}
        for name in self._weights:
            if f"{MODEL_PREFIX}{name}" in stored:
                continue
            for other in (here.get(name), tied.get(name), reverse.get(name)):
                if other in self._weights and f"{MODEL_PREFIX}{other}" in stored:
                    copies[name] = str(other)
                    break
        return copies

    @torch.no_grad()
    def install(self, loaded: frozenset[str]) -> None:
        """Put what was read where it belongs; the parameters have been filled in place already."""
        for name, source in self._copies.items():
            self._weights[name].copy_(self._weights[source])
        for twin, name in self._twins:
            twin.copy_(self._weights[name])
        self.install_extra()
        for number, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer_{number}."
            flat = {key.removeprefix(prefix): self.state[key] for key in loaded if key.startswith(prefix)}
            _install(self._names, optimizer, flat)

    def install_extra(self) -> None:
        """Give modules the states of their own that are no tensors."""
        extra = {own: self.state[f"{MODEL_PREFIX}{name}"] for own, name in self._extra.items()}
        if extra:
            self.module.load_state_dict(extra, strict=False)


def _placeholders(
    module: nn.Module, names: Mapping[Tensor, str], optimizer: Optimizer, stored: Index
) -> dict[str, Any]:
    """One placeholder for each stored name of the optimizer's parameters, and one for each parameter without any."""
    owners = {_name(names, p): p for group in optimizer.param_groups for p in group["params"]}
    owned = by_owner(stored, owners)
    if any(_is_factored(stored[key], owners[name]) for name, keys in owned.items() for key in keys):
        get_optimizer_state_dict(module, optimizer)
    flat: dict[str, Any] = {}
    for name, keys in owned.items():
        existing = optimizer.state.get(owners[name], {})
        for key in keys or (f"{GROUPS}{name}.lr",):
            flat[key] = _placeholder(stored.get(key), owners[name], existing.get(key.removeprefix(f"{STATE}{name}.")))
    return flat


def _install(names: Mapping[Tensor, str], optimizer: Optimizer, flat: Mapping[str, Any]) -> None:
    keys = by_owner(flat, [names[p] for group in optimizer.param_groups for p in group["params"]])
    done: set[str] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            prefix = f"{STATE}{name}."
            state = {key.removeprefix(prefix): flat[key] for key in keys[name] if is_state(key)}
            if state:
                own = _copied(state) if name in done else state
                optimizer.state[parameter] = on_device(own, parameter, group)
            done.add(name)
        group.update(common_values(GROUPS, [names[p] for p in group["params"]], flat))


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def on_device(state: dict[str, Any], parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Counters live in host memory, except where a fused or capturable step reads them on the device."""
    if not (group.get("fused") or group.get("capturable")):
        return state
    return {key: v.to(parameter.device) if isinstance(v, Tensor) else v for key, v in state.items()}


def common_values(section: str, members: Iterable[str], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Options (or counters) of one group from those of its parameters, which must agree.

    Args:
        section: ``GROUPS`` or ``STATE``.
        members: Names of the parameters.
        flat: Values by full key.

    Raises:
        CheckpointMismatchError: Two parameters have different values of one option.
    """
    found: dict[str, Any] = {}
    keys = by_owner((key for key in flat if key.startswith(section)), members)
    for name, own in keys.items():
        for key in own:
            option = key.removeprefix(f"{section}{name}.")
            if option in _HOW_TO_RUN:
                continue
            if option in found and not _same(found[option], flat[key]):
                raise CheckpointMismatchError(
                    f"the checkpoint has several values of {option} for the parameters of one group "
                    f"({found[option]} and, for {name}, {flat[key]}).",
                    fix="Form the parameter groups of the optimizer as the run that saved it did.",
                )
            found.setdefault(option, flat[key])
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return bool(one == other)


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the LightningModule.",
            fix="Register the module that owns it as an attribute of the LightningModule.",
        )
    return names[parameter]


def _entry(name: str, key: str, value: Any) -> Any:
    if isinstance(value, dict | list | tuple) and _holds_tensor(value):
        raise CheckpointError(
            f"the optimizer keeps tensors inside a {type(value).__name__} ({key} of {name}).",
            fix="Use an optimizer whose state is a tensor or a plain value per name.",
        )
    return value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(_holds_tensor(v) for v in value))


def is_state(key: str) -> bool:
    """Whether ``key`` is a parameter's own state, and not an option of its group."""
    return key.startswith(STATE)


def by_owner(keys: Iterable[str], owners: Iterable[str]) -> dict[str, list[str]]:
    """Keys by parameter name. Names may contain one another, so the longest prefix that is a name counts."""
    found: dict[str, list[str]] = {name: [] for name in owners}
    for key in keys:
        name = key.removeprefix(STATE) if is_state(key) else key.removeprefix(GROUPS)
        while "." in name:
            name = name.rpartition(".")[0]
            if name in found:
                found[name].append(key)
                break
    return found


def _is_factored(entry: tuple[torch.Size, torch.dtype] | None, parameter: Tensor) -> bool:
    return entry is not None and entry[0].numel() > 1 and entry[0] != parameter.shape


def _placeholder(entry: tuple[torch.Size, torch.dtype] | None, parameter: Tensor, existing: Any) -> Any:
    if entry is None:
        return None
    if isinstance(existing, Tensor):
        return existing
    shape, dtype = entry
    if shape == parameter.shape and (isinstance(parameter, DTensor) or len(shape) > 0):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype)
