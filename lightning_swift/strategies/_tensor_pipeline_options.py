"""The options of tensor and pipeline parallelism as one checked value, and the sizes that follow from "auto"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.mesh import AxisSize, MeshSizes, check_axis_size
from lightning_swift.parallel.schedule import ScheduleName, ScheduleSettings
from lightning_swift.parallel.sharding import ShardingSettings
from lightning_swift.parallel.tensor import TensorParallelSettings
from lightning_swift.strategies._options import MeshOptions

__all__ = ["LossFunction", "Microbatches", "StageBalance", "TensorPipelineOptions", "load_loss"]

LossFunction = Callable[[Tensor, Tensor], Tensor]
Microbatches = int | Literal["auto"]
StageBalance = Literal["auto"] | list[int]

# Schedules that compute the gradients of inputs and of weights at different times.
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class TensorPipelineOptions(MeshOptions):
    """What :class:`TensorPipelineStrategy` asks of the engine, and documents.

    Raises:
        ConfigurationError: A value is not allowed, or two contradict each other.
    """

    tensor_parallel_size: AxisSize = "auto"
    pipeline_parallel_size: AxisSize = "auto"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    tp_plan: Mapping[str, str] | None = None
    schedule: ScheduleName = "1F1B"
    microbatches: Microbatches = "auto"
    virtual_stages: int | None = None
    stage_balance: StageBalance = "auto"
    loss_fn: str | LossFunction | None = None
    gather_logits: bool = False
    check_batches: bool = True
    self_check: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_axis_size("tensor_parallel_size", self.tensor_parallel_size)
        check_axis_size("pipeline_parallel_size", self.pipeline_parallel_size)
        if self.microbatches != "auto" and (type(self.microbatches) is not int or self.microbatches < 1):
            raise ConfigurationError(
                f'microbatches={self.microbatches!r} must be "auto" or a positive integer.', where="options"
            )
        if self.reshard_after_forward is True and self.schedule in _SPLIT_BACKWARD:
            raise ConfigurationError(
                f"reshard_after_forward=True and schedule={self.schedule!r} contradict each other: the "
                "second half of its backward passes would give gradients to weights that have been freed in between.",
                where="options",
                fix="Leave reshard_after_forward out, or choose 1F1B or Interleaved1F1B.",
            )
        self._check_balance()
        self.tensor  # noqa: B018  # checks its options against each other
        load_loss(self.loss_fn)
        ScheduleSettings(self.schedule)
        if isinstance(self.pipeline_parallel_size, int):
            self._scheduled(self.pipeline_parallel_size)

    @property
    @override
    def sharding(self) -> ShardingSettings:
        # Gathering each layer again for every microbatch would cost more than it saves in all but the largest models.
        after = False if self.reshard_after_forward == "auto" else self.reshard_after_forward
        return replace(super().sharding, reshard_after_forward=after)

    @property
    def tensor(self) -> TensorParallelSettings:
        """What tensor parallelism needs to know."""
        return TensorParallelSettings(self.sequence_parallel, self.loss_parallel, self.tp_plan, self.self_check)

    @override
    def sizes(self, world_size: int, nodes: int = 1) -> MeshSizes:
        pp, tp = self._pipeline_size(world_size, nodes), self.tensor_parallel_size
        copies = 1 if self.data_parallel_replicate == "auto" else self.data_parallel_replicate
        if tp == "auto":
            tp = self._tensor_size(world_size, nodes, pp * copies)
        sizes = MeshSizes.resolve(
            world_size, shard=self.data_parallel_shard, replicate=self.data_parallel_replicate, pp=pp, tp=tp
        )
        self._check_use(sizes)
        return sizes

    def scheduled(self, sizes: MeshSizes) -> ScheduleSettings:
        """The schedule on a mesh of these sizes, checked against the rules of its kind."""
        return self._scheduled(sizes.pp)

    def _scheduled(self, pp: int) -> ScheduleSettings:
        count = None if self.microbatches == "auto" else self.microbatches
        # On one rank nothing is passed on, and neither the order nor virtual stages mean anything.
        name, virtual = (self.schedule, self.virtual_stages) if pp > 1 else ("1F1B", None)
        settings = ScheduleSettings.default(name, pp, microbatches=count, virtual_stages=virtual)
        settings.check(pp)
        return settings

    def _pipeline_size(self, world_size: int, nodes: int) -> int:
        if self.pipeline_parallel_size != "auto":
            return self.pipeline_parallel_size
        others = (self.tensor_parallel_size, self.data_parallel_shard)
        if "auto" in others:
            # Machines are joined by the slowest links, and a pipeline sends least.
            return nodes
        copies = 1 if self.data_parallel_replicate == "auto" else self.data_parallel_replicate
        return max(1, world_size // (int(others[0]) * int(others[1]) * copies))

    def _tensor_size(self, world_size: int, nodes: int, others: int) -> int:
        if self.data_parallel_shard != "auto":
            return max(1, world_size // (others * self.data_parallel_shard))
        return max(1, world_size // nodes // max(1, others // nodes))

    def _check_balance(self) -> None:
        balance: object = self.stage_balance
        whole = isinstance(balance, list) and bool(balance) and all(type(n) is int and n > 0 for n in balance)
        if balance != "auto" and not whole:
            raise ConfigurationError(
                f'stage_balance={balance!r} must be "auto" or the number of layers of each stage.', where="options"
            )

    def _check_use(self, sizes: MeshSizes) -> None:
        for option in ("sequence_parallel", "loss_parallel"):
            if getattr(self, option) and sizes.tp == 1:
                raise ConfigurationError(
                    f"{option}=True divides work within a tensor-parallel group, and the mesh ({sizes}) has none.",
                    where="options",
                    fix=f"Leave {option} out, or choose a tensor_parallel_size above 1.",
                )
        stages = self.scheduled(sizes).n_stages(sizes.pp)
        if isinstance(self.stage_balance, list) and len(self.stage_balance) != stages:
            raise ConfigurationError(
                f"stage_balance has {len(self.stage_balance)} entries for {stages} stages "
                f"(pipeline_parallel_size={sizes.pp} x virtual_stages={stages // sizes.pp}).",
                where="options",
                fix="Give one number of layers for each stage, first stage first.",
            )


def load_loss(loss: str | LossFunction | None) -> LossFunction | None:
    """The callable that ``loss`` is or names (``"package.module.function"``).

    Raises:
        ConfigurationError: The path leads nowhere, or to something that cannot be called.
    """
    if loss is None or callable(loss):
        return loss
    module, _, name = loss.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"loss_fn={loss!r} cannot be imported: {error}.", where="options", fix='Write "package.module.function".'
        ) from error
    if not callable(found):
        raise ConfigurationError(f"loss_fn={loss!r} is a {type(found).__name__}, not a function.", where="options")
    function: LossFunction = found
    return function
