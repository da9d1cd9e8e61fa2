"""Norm and clipping of gradients that may be sharded, on one or several meshes, next to plain ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ModelError

__all__ = ["OtherStages", "clip_by_norm", "clip_by_value", "gradient_norm", "total_norm"]

# What torch.nn.utils.clip_grad_norm_ adds to the norm before dividing.
_EPSILON = 1e-6


@dataclass(frozen=True)
class OtherStages:
    """What the norm of a pipeline's gradients takes besides those of this rank's stages.

    Args:
        group: The ranks that hold the other stages; all of them must measure together.
        device: Where this rank talks to them.
        copies: Parameters of this rank of which another stage holds the one that counts (tied weights). They are
            scaled and not measured.
    """

    group: dist.ProcessGroup
    device: torch.device
    copies: frozenset[nn.Parameter] = field(default=frozenset())


@torch.no_grad()
def total_norm(gradients: Iterable[Tensor], norm_type: float = 2.0, *, others: OtherStages | None = None) -> Tensor:
    """Norm of all gradients seen as one vector, in float32, the same on every rank.

    Args:
        gradients: Plain tensors, equal on all ranks and counted once, and DTensors, which may lie on different meshes.
        norm_type: Order of the norm; ``math.inf`` for the largest magnitude.
        others: The other stages of a pipeline. Only ``group`` and ``device`` are used: leave out the gradients of
            ``copies``.

    Returns:
        A plain scalar on the device of the first gradient; 0 on the CPU if there is none.
    """
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = {}
    device = torch.device("cpu")
    for index, gradient in enumerate(gradients):
        local = _local(gradient)
        device = local.device if index == 0 else device
        groups.setdefault(_spread(gradient), []).append(local)
    norms = [_reduce(_norm(parts, norm_type), *spread, norm_type) for spread, parts in groups.items()]
    norm = _combine([norm.to(device) for norm in norms], norm_type).to(device)
    return norm if others is None else _sum_over(norm.to(others.device), [others.group], norm_type)


def gradient_norm(
    parameters: Iterable[nn.Parameter], norm_type: float = 2.0, *, others: OtherStages | None = None
) -> Tensor:
    """:func:`total_norm` of the gradients of ``parameters``, each weight counted once."""
    copies = frozenset[nn.Parameter]() if others is None else others.copies
    gradients = (p.grad for p in parameters if p.grad is not None and p not in copies)
    return total_norm(gradients, norm_type, others=others)


@torch.no_grad()
def clip_by_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0, *, others: OtherStages | None = None
) -> Tensor:
    """Scale all gradients so that their common norm is at most ``max_norm``; return the norm before.

    As in torch, a norm that is not finite scales the gradients by it, so that the fault shows in the next loss.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type, others=others)
    gradients = [p.grad for p in parameters if p.grad is not None]
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    for gradient in gradients:
        local = _local(gradient)
        local.mul_(factor.to(local.device))
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[nn.Parameter], value: float) -> None:
    """Limit each element of each gradient to ``[-value, value]``."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-value, value)


def _local(gradient: Tensor) -> Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    if any(placement.is_partial() for placement in gradient.placements):
        raise ModelError("a gradient still waits for its reduction and cannot be measured or clipped.")
    return gradient.to_local()


def _spread(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a gradient and the axes along which its ranks hold different parts."""
    if not isinstance(gradient, DTensor):
        return None, ()
    split = tuple(axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.device_mesh, split


def _norm(tensors: list[Tensor], norm_type: float) -> Tensor:
    # The largest element of nothing is undefined; a rank may hold no row of a small parameter.
    held = [tensor for tensor in tensors if tensor.numel()]
    norms = [torch.linalg.vector_norm(tensor, norm_type, dtype=torch.float32) for tensor in held]
    return _combine([norm.to(tensors[0].device) for norm in norms], norm_type).to(tensors[0].device)


def _combine(norms: list[Tensor], norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)


def _reduce(norm: Tensor, mesh: DeviceMesh | None, axes: tuple[int, ...], norm_type: float) -> Tensor:
    if mesh is None or not axes:
        return norm
    # With CPU offload the gradients are in host memory while the mesh talks between devices.
    value = norm.to(mesh.device_type)
    return _sum_over(value, [mesh.get_group(axis) for axis in axes], norm_type).to(norm.device)


def _sum_over(norm: Tensor, groups: list[dist.ProcessGroup], norm_type: float) -> Tensor:
    """The norm of what all ranks of ``groups`` hold together, from that of each."""
    largest = math.isinf(norm_type)
    value = norm.clone() if largest else norm**norm_type
    for group in groups:
        dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return value if largest else value ** (1.0 / norm_type)
