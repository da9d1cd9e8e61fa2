"""The options of the mesh engine as one checked value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_swift.adapters.settings import AdapterSettings, LoraSettings, Quantization
from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.apply import check_backend
from lightning_swift.parallel.dtypes import PrecisionName, PrecisionPolicy, ReduceName
from lightning_swift.parallel.memory import ReturnMemory
from lightning_swift.parallel.mesh import AxisSize, MeshSizes, check_axis_size
from lightning_swift.parallel.sharding import Reshard, ShardingSettings

__all__ = ["MeshOptions", "options_among"]

# What lies beside the options among the local names of a constructor.
_NO_OPTIONS = ("self", "save_frozen", "__class__")


def options_among(local_names: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a strategy among ``locals()`` at the head of its constructor.

    They are the fields of its checked value under their own names; one that is not is a ``TypeError`` there.
    """
    return {name: value for name, value in local_names.items() if name not in _NO_OPTIONS}


@dataclass(frozen=True)
class MeshOptions:
    """What a preset asks of the engine. :class:`FSDPBF16Strategy` documents each option.

    Raises:
        ConfigurationError: A value is not allowed, or two contradict each other.
    """

    precision: PrecisionName = "bf16-mixed"
    data_parallel_shard: AxisSize = "auto"
    data_parallel_replicate: AxisSize = 1
    reduce_dtype: ReduceName = "float32"
    cpu_offload: bool = False
    reshard_after_forward: Reshard = "auto"
    accumulate_without_sync: bool = False
    return_freed_memory: ReturnMemory = "auto"
    compile: str | None = None
    block_classes: tuple[str, ...] | None = None
    process_group_backend: str | None = None
    timeout: float = 1800.0
    lora: LoraSettings | None = None
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        self.policy  # noqa: B018  # checks the precision and the reduction against each other
        check_axis_size("data_parallel_shard", self.data_parallel_shard)
        check_axis_size("data_parallel_replicate", self.data_parallel_replicate)
        check_backend(self.compile)
        for switch in ("reshard_after_forward", "return_freed_memory"):
            value = getattr(self, switch)
            if value not in (True, False, "auto"):
                raise ConfigurationError(f'{switch}={value!r} is not true, false or "auto".', where="options")
        if self.block_classes is not None and not self.block_classes:
            raise ConfigurationError(
                "block_classes=[] would leave the model in one piece.",
                where="options",
                fix="Leave it out to have the blocks found, or name their classes.",
            )
        if not self.timeout > 0:
            raise ConfigurationError(f"timeout={self.timeout!r} must be a positive number of seconds.", where="options")
        self.adapters  # noqa: B018  # checks them against each other
        if self.quantization is not None:
            raise ConfigurationError(
                f"quantization={self.quantization!r} and data_parallel_shard do not go together yet: packed weights "
                "cannot be cut over ranks.",
                where="quantization and data_parallel_shard",
                fix="Use lora without quantization here, or DDPBF16Strategy or ZeRO3QLoRAStrategy with both.",
            )

    @property
    def policy(self) -> PrecisionPolicy:
        """The dtypes of the precision."""
        return PrecisionPolicy(self.precision, self.reduce_dtype)

    @property
    def adapters(self) -> AdapterSettings:
        """What is put into the model."""
        return AdapterSettings(self.lora, self.quantization)

    @property
    def sharding(self) -> ShardingSettings:
        """What ``fully_shard`` needs to know."""
        return ShardingSettings(self.policy, self.cpu_offload, self.reshard_after_forward)

    def sizes(self, world_size: int, nodes: int = 1) -> MeshSizes:
        """The mesh on ``world_size`` ranks of ``nodes`` machines.

        Raises:
            ConfigurationError: The sizes do not fit.
        """
        return MeshSizes.resolve(
            world_size, shard=self.data_parallel_shard, replicate=self.data_parallel_replicate, pp=1, tp=1
        )
