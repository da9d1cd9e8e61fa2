"""Makes ranks start from the same values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_swift.parallel.mesh import MeshAxis

__all__ = ["copy_from_first_rank"]


@torch.no_grad()
def copy_from_first_rank(model: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give every data-parallel rank the parameters and buffers of the first one, as DDP does.

    A model that each rank initialises for itself may differ between them; shards cut from different models would be
    a model that nobody made. Tensors on the meta device have no values yet and are left out.
    """
    axes = [axis for axis in (MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD) if mesh[axis].size() > 1]
    groups = [mesh.get_group(axis) for axis in axes]
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta and tensor.numel():
            _broadcast(tensor, groups, device)


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
