"""The mesh engine: one Lightning strategy over a device mesh with named axes, of which the public ones are presets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from typing_extensions import override

from lightning_swift.adapters.optimizers import keep_trainable
from lightning_swift.errors import ModelError
from lightning_swift.models.lazy import is_lazy, load_lazy_weights
from lightning_swift.parallel.agreement import copy_from_first_rank, copy_state_buffers
from lightning_swift.parallel.apply import choose_blocks, compile_blocks
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.parallel.dtypes import PrecisionName, cast_parameters, check_masters
from lightning_swift.parallel.gradients import gradient_norm
from lightning_swift.parallel.memory import return_freed_memory
from lightning_swift.parallel.mesh import MeshSizes, build_mesh, data_parallel_rank
from lightning_swift.parallel.sharding import device_of_shards, reshard, shard, sharded_roots
from lightning_swift.strategies._adapters import add_adapters
from lightning_swift.strategies._checkpointing import ShardedCheckpointing
from lightning_swift.strategies._mesh_setup import evaluate_under_no_grad, move_the_rest, refuse_empty
from lightning_swift.strategies._options import MeshOptions
from lightning_swift.strategies._precision import MeshPrecision, OwnPrecision

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["MeshStrategy"]

# Under this name the LightningModule remembers what it was sharded with.
_APPLIED = "_lightning_swift_applied"


class MeshStrategy(ShardedCheckpointing, OwnPrecision, ModelParallelStrategy):
    """Applies parallelism to an unchanged LightningModule.

    Args:
        options: What the preset asks for.

    Attributes:
        activation_checkpointing: Set by the callback of that name before the model is set up.
        loads_lazy_weights: Tells modules that they may build lazily: weights are read after sharding.
    """

    loads_lazy_weights = True

    def __init__(self, options: MeshOptions) -> None:
        self.options = options
        self.activation_checkpointing: CheckpointingSettings | None = None
        self._precision = MeshPrecision(options.precision)
        super().__init__(
            process_group_backend=options.process_group_backend, timeout=timedelta(seconds=options.timeout)
        )

    @override
    def _use_precision(self, precision: PrecisionName) -> None:
        self.options = replace(self.options, precision=precision)
        self._precision = MeshPrecision(precision)

    @property
    def _returns_memory(self) -> bool:
        # Elsewhere gathered parameters are not in host memory, or nothing is gathered.
        on_cpu = self.root_device.type == "cpu" and self.world_size > 1
        return on_cpu if self.options.return_freed_memory == "auto" else self.options.return_freed_memory

    @property
    def mesh_sizes(self) -> MeshSizes:
        """Number of ranks along each axis of the mesh."""
        return self.options.sizes(self.world_size, self.num_nodes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.mesh_sizes.data_parallel, "rank": data_parallel_rank(self.device_mesh)}

    def gradient_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all gradients of the module as one vector, a plain float32 scalar equal on all ranks; to log it.

        For ``on_before_optimizer_step``, where Lightning's own ``grad_norm`` knows no sharded gradients.
        """
        assert self.lightning_module is not None
        return gradient_norm(self.lightning_module.parameters(), norm_type, others=self._precision.other_stages)

    @override
    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        # The first moment at which the number of ranks is known: sizes that do not fit are refused here.
        self.options.sizes(self.num_nodes * self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        if self._returns_memory:
            return_freed_memory()
        self._setup_distributed()
        self._device_mesh = build_mesh(self.mesh_sizes, self.root_device.type)
        assert self.lightning_module is not None
        # Lightning's own place for it: `self.device_mesh` in the LightningModule.
        self.lightning_module._device_mesh = self._device_mesh

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        if not self._is_applied(self.lightning_module):
            self._apply(self.lightning_module)
        self.barrier()
        evaluate_under_no_grad(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_masters(self.lightning_module, self.options.policy)
            self.setup_optimizers(trainer)
            rank_zero_info(f"{type(self).__name__}: {self.options.policy}, mesh {self.mesh_sizes}")
        self.setup_precision_plugin()

    def _apply(self, module: pl.LightningModule) -> None:
        """The order of transforms, from the model as the user has built it to shards that hold its weights."""
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        self._split_into_stages(module)
        self._add_adapters(module)
        self._report_casts(cast_parameters(module, self.options.policy))
        copy_from_first_rank(module, self.device_mesh, self.root_device)
        self._split_tensors(module)
        blocks = choose_blocks(module, self.options.block_classes)
        if self.activation_checkpointing is not None:
            apply_checkpointing(module, self.activation_checkpointing)
        compile_blocks(blocks, self.options.compile)
        self._shard(module, blocks)
        if is_lazy(module):
            load_lazy_weights(module, device=device_of_shards(self.root_device, self.options.sharding))
        self._finish(module, len(blocks))

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            keep_trainable(optimizer, [config.scheduler for config in self.lr_scheduler_configs])

    def _split_into_stages(self, module: pl.LightningModule) -> None:
        """Leave this rank its stages of the pipeline. Without one there is nothing to do."""

    def _add_adapters(self, module: nn.Module) -> None:
        """Put adapters into the Hugging Face model below ``module``."""
        add_adapters(module, self.options.adapters, self.options.policy, type(self).__name__)

    def _split_tensors(self, module: pl.LightningModule) -> None:
        """Cut layers over the tensor-parallel ranks. Without such ranks there is nothing to do."""

    def _shard(self, module: pl.LightningModule, blocks: list[tuple[str, nn.Module]]) -> None:
        """Cut what is left over the data-parallel ranks."""
        shard(module, self.device_mesh, self.options.sharding, blocks)

    @override
    def model_to_device(self) -> None:
        """Nothing: ``fully_shard`` and the loader have put every tensor where it belongs."""

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        if not self.options.accumulate_without_sync:
            yield
            return
        assert self.lightning_module is not None
        roots = sharded_roots(self.lightning_module)
        for root in roots:
            root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for root in roots:
                root.set_requires_gradient_sync(True)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._agree_on_buffers()
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._agree_on_buffers()
        return self._resharded(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._agree_on_buffers()
        return self._resharded(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._agree_on_buffers()
        return self._resharded(super().predict_step(*args, **kwargs))

    def _agree_on_buffers(self) -> None:
        assert self.lightning_module is not None
        copy_state_buffers(self.lightning_module, self.device_mesh, self.root_device)

    def _resharded(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        # Without a backward pass the outermost groups stay gathered, and a checkpoint would not find the shards.
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        return output

    @property
    def _what_is_applied(self) -> tuple[object, ...]:
        """What a module that was set up keeps for good."""
        return self.options.sharding, self.mesh_sizes

    def _is_applied(self, module: pl.LightningModule) -> bool:
        applied = module.__dict__.get(_APPLIED)
        if applied is None and sharded_roots(module):
            raise ModelError(
                "the model has been sharded by fully_shard already.",
                where=type(module).__name__,
                fix=f"Build the plain model in configure_model; {type(self).__name__} shards it.",
            )
        current = self._what_is_applied
        if applied is not None and applied != current:
            raise ModelError(
                f"the model was set up with {applied} and cannot be set up again with {current}.",
                where=type(module).__name__,
                fix="Make a new LightningModule, or use the same strategy options.",
            )
        return applied is not None

    def _report_casts(self, changed: int) -> None:
        if changed:
            rank_zero_info(
                f"{type(self).__name__}: {changed} parameters were cast to {self.options.policy.master_dtype}, "
                f"in which precision={self.options.precision!r} keeps them."
            )

    def _finish(self, module: pl.LightningModule, blocks: int) -> None:
        refuse_empty(module)
        setattr(module, _APPLIED, self._what_is_applied)
        move_the_rest(module, self.root_device)
        if not blocks:
            rank_zero_warn(
                f"{type(module).__name__}: no repeated blocks were found, so each child is gathered as a whole. Name "
                "the classes of its blocks with block_classes to save memory."
            )
