"""Makes ranks start from the same values, and keeps running statistics the same while they train."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_swift.parallel.mesh import MeshAxis

__all__ = ["copy_from_first_rank", "copy_state_buffers"]


@torch.no_grad()
def copy_from_first_rank(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank that holds the same layers the parameters and buffers of the first one, as DDP does.

    A model that each rank initialises for itself may differ between them; shards cut from different models would be
    a model that nobody made. Tensors on the meta device have no values yet and are left out.
    """
    groups = _groups(mesh)
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta and tensor.numel():
            _broadcast(tensor, groups, device)


@torch.no_grad()
def copy_state_buffers(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank of the same layers the first one's buffers of the ``state_dict``, in one message per axis.

    Layers such as batch normalisation change them in the forward pass, each rank by its own samples. DDP does the same
    before each step (``broadcast_buffers``). Constant tables are not in the ``state_dict`` and cost nothing here.
    """
    groups = _groups(mesh)
    buffers = [buffer for buffer in _state_buffers(model) if buffer.numel()] if groups else []
    if not buffers:
        return
    parts = [buffer.detach().to(device).reshape(-1).view(torch.uint8) for buffer in buffers]
    values = torch.cat(parts)
    _broadcast(values, groups, device)
    for buffer, part in zip(buffers, values.split([part.numel() for part in parts]), strict=True):
        # A copy, since a slice of the message need not lie where the dtype wants it.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _state_buffers(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for part in model.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    # Ranks of one tensor-parallel group start from the same whole model, of which each then keeps its part.
    shared = (MeshAxis.TP, MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD)
    axes = [axis for axis in shared if mesh[axis].size() > 1]
    return [mesh.get_group(axis) for axis in axes]


def _broadcast(tensor: Tensor, groups: list[dist.ProcessGroup], device: torch.device) -> None:
    if not groups:
        return
    # As bytes, because gloo does not know every dtype (booleans, for one).
    values = tensor.detach().to(device).contiguous()
    flat = values.view(-1).view(torch.uint8)
    for group in groups:
        dist.broadcast(flat, group=group, group_src=0)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)
