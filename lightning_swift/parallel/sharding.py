"""Cuts a module into groups and applies ``fully_shard`` to each: blocks, embedding, head, the rest of each child."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.modules.batchnorm import _NormBase

from lightning_swift.errors import ModelError
from lightning_swift.parallel.blocks import class_names, find_embeddings, is_separable
from lightning_swift.parallel.dtypes import PrecisionPolicy
from lightning_swift.parallel.mesh import MeshAxis, data_parallel_mesh

__all__ = [
    "Reshard",
    "ShardingSettings",
    "device_of_shards",
    "refuse_scalars",
    "reshard",
    "shard",
    "sharded_roots",
    "would_only_copy",
]

Reshard = bool | Literal["auto"]
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class ShardingSettings:
    """How parameters are gathered and where their shards live.

    Args:
        precision: Dtypes of masters, computation and reduction.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        reshard_after_forward: Free gathered parameters after the forward pass and gather them again in the backward
            pass. ``"auto"`` does so for all but the head and the outermost group, which are needed again at once.
    """

    precision: PrecisionPolicy
    cpu_offload: bool = False
    reshard_after_forward: Reshard = "auto"


def shard(
    module: nn.Module, mesh: DeviceMesh, settings: ShardingSettings, blocks: list[tuple[str, nn.Module]]
) -> list[FSDPModule]:
    """Shard every parameter below ``module`` over the data-parallel axes of ``mesh``, in place.

    The children of ``module`` become independent roots, since a step calls them one by one. Only parameters that lie
    on ``module`` itself, or that several children share, make ``module`` the root; its step methods then gather them.

    Args:
        module: A module whose steps call its children (a LightningModule).
        mesh: The whole device mesh.
        settings: Precision, offload and resharding.
        blocks: Modules below ``module`` that become groups of their own, with their names.

    Returns:
        The outermost sharded modules.

    Raises:
        ModelError: A parameter that cannot be sharded.
    """
    refuse_scalars(module)
    options = _options(mesh, settings)
    _shard_statistics(module, settings, options)
    units, aliases = _units(module)
    # The innermost first: a group takes what its inner groups have left.
    inner = [(block, False) for _, block in reversed(blocks)] + find_embeddings(module) + [(a, False) for a in aliases]
    for part, is_head in inner:
        sharded = isinstance(part, FSDPModule) or next(part.parameters(), None) is None
        if part not in units and not sharded and is_separable(part, module):
            fully_shard(part, reshard_after_forward=_setting(settings, auto=not is_head), **options)
    _shard_units(module, units, aliases, settings, options)
    return sharded_roots(module)


def would_only_copy(module: nn.Module, mesh: DeviceMesh, settings: ShardingSettings) -> bool:
    """Whether :func:`shard` would change nothing but the time and memory of a step.

    On one rank a group copies its parameters to "gather" them and its gradients to "reduce" them, which pays only for
    casts and offload. With tensor parallelism it also gives all parameters one mesh, which optimizers ask for.
    """
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    casts = settings.precision.name != "32-true" or not dtypes <= {torch.float32}
    return mesh.size() == mesh[MeshAxis.PP].size() and not casts and not settings.cpu_offload


def sharded_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules of ``module``, itself included."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in sharded_roots(child)]


def reshard(module: nn.Module) -> None:
    """Free whatever parameters a forward pass without a backward pass has left gathered."""
    # By children: a pipelined model leaves its stages out of modules().
    if isinstance(module, FSDPModule):
        module.reshard()
    for child in module.children():
        reshard(child)


def _options(mesh: DeviceMesh, settings: ShardingSettings) -> dict[str, Any]:
    precision = settings.precision
    # Host memory can only be pinned where there is a device to copy to.
    pinned = mesh.device_type != "cpu"
    return {
        "mesh": data_parallel_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=precision.compute_dtype, reduce_dtype=precision.reduce_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if settings.cpu_offload else OffloadPolicy(),
    }


def _setting(settings: ShardingSettings, *, auto: bool | None) -> bool | None:
    return auto if settings.reshard_after_forward == "auto" else settings.reshard_after_forward


def _shard_statistics(module: nn.Module, settings: ShardingSettings, options: dict[str, Any]) -> None:
    """Make a group of each layer that keeps running statistics: batch_norm wants its weights in the same float32."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=options["mp_policy"].reduce_dtype, cast_forward_inputs=False
    )
    for part in list(module.modules()):
        keeps = (
            isinstance(part, _NormBase) and part.running_mean is not None and next(part.parameters(), None) is not None
        )
        if keeps and part is not module and is_separable(part, module):
            fully_shard(part, reshard_after_forward=_setting(settings, auto=True), **{**options, "mp_policy": policy})


def _shard_units(
    module: nn.Module,
    units: list[nn.Module],
    aliases: list[nn.Module],
    settings: ShardingSettings,
    options: dict[str, Any],
) -> None:
    # For torch, None means True unless the module turns out to be a root.
    after = _setting(settings, auto=None)
    sharing = [unit for unit in units if not is_separable(unit, module, besides=aliases)]
    for unit in units:
        if unit not in sharing:
            fully_shard(unit, reshard_after_forward=after, **options)
    if sharing:
        # One group for all owners of a shared parameter, so that its gradient is summed before it is reduced.
        fully_shard(sharing, reshard_after_forward=after, **options)
    for unit in units:
        # A wrapper (peft's, for one) generates by calling the model inside, past its own forward.
        if "PreTrainedModel" not in class_names(unit) and callable(getattr(unit, "generate", None)):
            register_fsdp_forward_method(unit, "generate")
    if sharing or _own_parameters(module):
        _shard_outermost(module, after, options)


def _shard_outermost(module: nn.Module, after: bool | None, options: dict[str, Any]) -> None:
    # A step's batch may hold floating-point targets, which are not the model's inputs.
    policy = MixedPrecisionPolicy(
        param_dtype=options["mp_policy"].param_dtype,
        reduce_dtype=options["mp_policy"].reduce_dtype,
        cast_forward_inputs=False,
    )
    fully_shard(module, reshard_after_forward=after, **{**options, "mp_policy": policy})
    for step in _STEPS:
        if hasattr(module, step):
            register_fsdp_forward_method(module, step)


def _units(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The parameter-owning children, and those of them that are a second name of a part of another one."""
    children = list(_children(module))
    inside = {id(part) for child in children for part in child.modules() if part is not child}
    return [c for c in children if id(c) not in inside], [c for c in children if id(c) in inside]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    # Lists of modules have no forward to hook into.
    for child in module.children():
        if isinstance(child, _WITHOUT_FORWARD):
            yield from _children(child)
        elif not isinstance(child, (*_PARAMETER_LISTS, FSDPModule)) and next(child.parameters(), None) is not None:
            yield child


def _own_parameters(module: nn.Module) -> bool:
    if next(module.parameters(recurse=False), None) is not None:
        return True
    lists = (child for child in module.children() if isinstance(child, (*_WITHOUT_FORWARD, *_PARAMETER_LISTS)))
    return any(_own_parameters(child) for child in lists)


def refuse_scalars(module: nn.Module) -> None:
    """Refuse parameters of shape ``[]``, of which no rank can have a part.

    Raises:
        ModelError: There is one.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ModelError(
                "a parameter without dimensions cannot be sharded.", where=name, fix="Give it the shape [1]."
            )


def device_of_shards(device: torch.device, settings: ShardingSettings) -> torch.device:
    """Where the shards live, given the device that computes."""
    return torch.device("cpu") if settings.cpu_offload else device
