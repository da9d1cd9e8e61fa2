"""The device mesh: four named axes, how large each is, and which rank holds which share of the data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_swift.errors import ConfigurationError

__all__ = [
    "AxisSize",
    "MeshAxis",
    "MeshSizes",
    "build_mesh",
    "check_axis_size",
    "data_parallel_mesh",
    "data_parallel_rank",
]

AxisSize = int | Literal["auto"]


class MeshAxis(StrEnum):
    """Axes of the mesh, outermost first: ranks next to each other share the innermost one."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    TP = "tp"


@dataclass(frozen=True)
class MeshSizes:
    """Number of ranks along each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of :class:`MeshAxis`."""
        return tuple(getattr(self, axis) for axis in MeshAxis)

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in MeshAxis if getattr(self, axis) > 1) or "1 rank"

    @classmethod
    def resolve(
        cls, world_size: int, *, shard: AxisSize = "auto", replicate: AxisSize = 1, pp: int = 1, tp: int = 1
    ) -> MeshSizes:
        """Fill in ``"auto"`` so that the axes cover ``world_size`` ranks exactly.

        ``"auto"`` for both data-parallel axes means full sharding: ``replicate`` becomes 1.

        Raises:
            ConfigurationError: The sizes cannot be made to multiply to ``world_size``.
        """
        left, rest = divmod(world_size, pp * tp)
        copies = replicate if replicate != "auto" else 1 if shard == "auto" else max(1, left // shard)
        cut = shard if shard != "auto" else max(1, left // copies)
        if rest or copies * cut != left:
            others = f" x pp={pp} x tp={tp}" if pp * tp > 1 else ""
            raise ConfigurationError(
                f"data_parallel_replicate={copies} x data_parallel_shard={cut}{others} is not the number of "
                f"ranks, {world_size}.",
                where="device mesh",
                fix='Change one of the sizes, or leave data_parallel_shard="auto" and make data_parallel_replicate a '
                "divisor of the number of ranks.",
            )
        return cls(pp=pp, dp_replicate=copies, dp_shard=cut, tp=tp)


def check_axis_size(option: str, size: AxisSize) -> None:
    """Refuse a size that no number of ranks can satisfy.

    Raises:
        ConfigurationError: ``size`` is neither ``"auto"`` nor a positive integer.
    """
    if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigurationError(f'{option}={size!r} must be "auto" or a positive integer.', where="device mesh")


def build_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    """The mesh over all ranks, with every axis of :class:`MeshAxis` whatever its size. Needs a process group."""
    return init_device_mesh(device_type, sizes.shape, mesh_dim_names=tuple(axis.value for axis in MeshAxis))


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of ``mesh`` that ``fully_shard`` works on: one axis, or two for hybrid sharding."""
    if mesh[MeshAxis.DP_REPLICATE].size() == 1:
        return mesh[MeshAxis.DP_SHARD]
    return mesh[MeshAxis.DP_REPLICATE.value, MeshAxis.DP_SHARD.value]


def data_parallel_rank(mesh: DeviceMesh) -> int:
    """Index of this rank's share of the data, from 0 to ``MeshSizes.data_parallel - 1``."""
    replica, shard = mesh[MeshAxis.DP_REPLICATE], mesh[MeshAxis.DP_SHARD]
    return replica.get_local_rank() * shard.size() + shard.get_local_rank()
