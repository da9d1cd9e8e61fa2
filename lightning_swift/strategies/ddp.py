"""DDP with BF16: a whole copy of the model on every rank, for models that fit."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.optimizers import keep_trainable
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings, Quantization
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import is_lazy, load_lazy_weights
from lightning_swift.parallel.agreement import copy_from_first_rank
from lightning_swift.parallel.apply import check_backend, choose_blocks, compile_blocks
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.parallel.dtypes import PrecisionName, PrecisionPolicy, cast_parameters, check_masters
from lightning_swift.parallel.gradients import total_norm
from lightning_swift.parallel.mesh import MeshSizes, build_mesh
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen, check_save_frozen
from lightning_swift.strategies._checkpointing import ShardedCheckpointing
from lightning_swift.strategies._compression import Compression, CompressionSettings, register_compression
from lightning_swift.strategies._ddp_precision import DDPPrecision
from lightning_swift.strategies._precision import OwnPrecision
from lightning_swift.strategies._unread import LeavesUnread

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["DDPBF16Strategy"]

# Under this name the LightningModule remembers what was made of it.
_APPLIED = "_lightning_swift_ddp"


class DDPBF16Strategy(ShardedCheckpointing, LeavesUnread, OwnPrecision, DDPStrategy):
    """Trains any LightningModule with a whole copy of it on every rank, which exchange gradients.

    Also by name: ``Trainer(strategy="swift_ddp")``, which means BF16.

    Args:
        precision: ``"bf16-mixed"``: BF16 compute by autocast; weights, gradients, moments and reductions in FP32.
            ``"bf16-true"``: everything in BF16, half the memory, less exact. ``"32-true"``: everything in FP32.
        lora: Adapters to put into the Hugging Face model of the module; only they are trained then.
        quantization: Store the frozen linear layers under the adapters in 4 bits (``"nf4"``) or 8 (``"int8"``).
        double_quant: With ``"nf4"``, quantise the scales as well.
        compression: Make gradients smaller before ranks exchange them, for slow networks: ``"bf16"`` or ``"fp16"``
            (half the traffic; FP16 rounds less, and gradients are scaled so that none overflows), or ``"powersgd"``
            (low-rank matrices with error feedback, a fraction of the traffic, less exact, and memory for one more
            gradient). PowerSGD's memory is not in checkpoints: after a resume it starts again.
        powersgd_rank: Rank of those matrices.
        powersgd_start: Number of optimizer steps with whole gradients before PowerSGD begins, at least 2.
        bucket_cap_mb: Gradients are exchanged in buckets of this many MiB while the backward pass goes on.
        gradient_as_bucket_view: Let gradients live in those buckets, which saves the memory of one gradient.
        find_unused_parameters: Look in each step for parameters that the loss does not depend on. Costs time; without
            it such a parameter is an error.
        static_graph: Promise that every step uses the same parameters, which DDP then makes use of.
        accumulate_without_sync: With ``accumulate_grad_batches``, exchange gradients only with the last micro-batch.
        compile: Backend for ``torch.compile`` of each block (``"inductor"``, ``"aot_eager"``), or None.
        block_classes: Names of the classes to compile one by one, where the repeated blocks that are found
            automatically are not the right ones.
        save_frozen: Whether checkpoints repeat frozen weights that are those of the pretrained folder. ``"auto"``
            leaves them out of models with adapters: the checkpoint then names the folder and its content, and resuming,
            merging and exporting need it. Whatever is not in the folder as it is in memory is saved in any case.
        process_group_backend: ``"nccl"``, ``"gloo"``...; None chooses by device.
        timeout: Seconds after which a collective that not all ranks have joined is an error.

    Attributes:
        activation_checkpointing: Set by the callback of that name before the model is set up.
        chosen_by_name: True if the strategy was built from its registered name, so that the Trainer's precision
            decides between the BF16 ones.
        loads_lazy_weights: Tells modules that they may build lazily: every rank reads all weights at set-up.

    Raises:
        ConfigurationError: A value that is not allowed, or options that contradict each other or the Trainer's
            precision.
    """

    loads_lazy_weights = True

    def __init__(
        self,
        precision: PrecisionName = "bf16-mixed",
        *,
        lora: LoraSettings | None = None,
        quantization: Quantization | None = None,
        double_quant: bool = True,
        compression: Compression | None = None,
        powersgd_rank: int = 4,
        powersgd_start: int = 100,
        bucket_cap_mb: float = 25.0,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        accumulate_without_sync: bool = True,
        compile: str | None = None,
        block_classes: list[str] | None = None,
        save_frozen: SaveFrozen = "auto",
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        self.save_frozen = check_save_frozen(save_frozen)
        self.adapters = AdapterSettings(lora, quantization, double_quant)
        self.compression = CompressionSettings(compression, powersgd_rank, powersgd_start)
        self.policy = _policy(precision, self.compression)
        check_backend(compile)
        _check_positive(bucket_cap_mb=bucket_cap_mb, timeout=timeout)
        self.activation_checkpointing: CheckpointingSettings | None = None
        self._static_graph, self._learns_graph = static_graph, False
        self._accumulate_without_sync = accumulate_without_sync
        self._compile = compile
        self._block_classes = None if block_classes is None else tuple(block_classes)
        self._precision = DDPPrecision(precision)
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout),
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )

    @override
    def _use_precision(self, precision: PrecisionName) -> None:
        self.policy = _policy(precision, self.compression)
        self._precision = DDPPrecision(precision)

    def gradient_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all gradients of the module as one vector, a float32 scalar equal on all ranks; to log it.

        For ``on_before_optimizer_step``, when the ranks have exchanged their gradients.
        """
        return total_norm((p.grad for p in self._module.parameters() if p.grad is not None), norm_type)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._precision.device_type = self.root_device.type
        # Says in checkpoints how they were made, and lets the functions on meshes be used.
        self.device_mesh = build_mesh(MeshSizes(dp_replicate=self.world_size), self.root_device.type)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        module = self._module
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(module)
        if not _is_applied(module):
            self._apply(module)
        self.model_to_device()
        if fitting:
            self._prepare_fit(trainer, module)
        else:
            # A fit leaves this to the constructor of DDP.
            copy_from_first_rank(module, self.device_mesh, self.root_device)
        self.setup_precision_plugin()

    def _apply(self, module: pl.LightningModule) -> None:
        """The order of transforms. The model has been built; DDP comes last."""
        if self.adapters.quantization is not None:
            # Scales that quantising computes are no parameters, which DDP would make equal.
            copy_from_first_rank(module, self.device_mesh, self.root_device)
        report = apply_adapters(module, self.adapters, compute_dtype=self.policy.compute_dtype)
        if report.injected:
            rank_zero_info(f"{type(self).__name__}: {report}")
        changed = cast_parameters(module, self.policy)
        if changed:
            rank_zero_info(f"{type(self).__name__}: {changed} parameters were cast to {self.policy.master_dtype}.")
        if self.activation_checkpointing is not None:
            apply_checkpointing(module, self.activation_checkpointing)
        if self._compile is not None:
            compile_blocks(choose_blocks(module, self._block_classes), self._compile)
        if is_lazy(module):
            load_lazy_weights(module, device=self.root_device)
        _refuse_empty(module)
        setattr(module, _APPLIED, True)

    def _prepare_fit(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        check_masters(module, self.policy)
        _refuse_frozen(module)
        self.configure_ddp()
        self._learns_graph = self._static_graph
        self.setup_optimizers(trainer)
        compressed = f", compression {self.compression}" if self._compresses else ""
        rank_zero_info(f"{type(self).__name__}: {self.policy}, {self.world_size} ranks{compressed}")

    @property
    def _compresses(self) -> bool:
        # A single rank sends nothing, and rounding its gradients would be for nothing.
        return self.compression.method is not None and self.world_size > 1

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            keep_trainable(optimizer, [config.scheduler for config in self.lr_scheduler_configs])

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning's own method does nothing on the CPU, silently.
        if self._compresses:
            assert isinstance(self.model, DistributedDataParallel)
            self.powersgd_state = register_compression(self.model, self.compression)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._whole_graphs():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._whole_graphs():
            return super().validation_step(*args, **kwargs)

    def _whole_graphs(self) -> AbstractContextManager[None]:
        """Compile blocks as they are: torch would cut each once more by buckets, and fails on buckets below 1 MiB.

        Gradients of a block are exchanged while those of the one before it are computed, as blocks are separate graphs.
        """
        if self._compile is None:
            return nullcontext()
        from torch._dynamo import config

        patched: AbstractContextManager[None] = config.patch(optimize_ddp=False)
        return patched

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        if not self._accumulate_without_sync or self._learns_graph:
            # The first backward pass of a static graph is an assertion failure inside torch if it does not reduce.
            self._learns_graph = False
            yield
            return
        with super().block_backward_sync():
            yield

    @override
    def on_exception(self, exception: BaseException) -> None:
        if "finished reduction in the prior iteration" in str(exception):
            exception.add_note(
                "The loss of a step did not depend on all trainable parameters. If that is meant, use "
                f"{type(self).__name__}(find_unused_parameters=True); otherwise freeze those parameters."
            )


def _policy(precision: PrecisionName, compression: CompressionSettings) -> PrecisionPolicy:
    if precision == "bf16-true" and compression.method is not None:
        raise ConfigurationError(
            f"compression={compression.method!r} gains nothing with precision={precision!r}, whose gradients have 16 "
            "bits, and PowerSGD's error feedback needs more.",
            where="compression and precision",
            fix='Leave compression out, or use precision="bf16-mixed".',
        )
    return PrecisionPolicy(precision, "bfloat16" if precision == "bf16-true" else "float32")


def _check_positive(**values: float) -> None:
    for option, value in values.items():
        if not value > 0:
            raise ConfigurationError(f"{option}={value!r} must be a positive number.", where="options")


def _is_applied(module: nn.Module) -> bool:
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ModelError(
            "the model is sharded already.",
            where=type(module).__name__,
            fix="Make a new LightningModule for DDP.",
        )
    return _APPLIED in module.__dict__


def _refuse_empty(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ModelError(
                "the tensor is on the meta device and nothing is known to fill it with.",
                where=name,
                fix="Build pretrained models with lightning_swift.lazy_pretrained, and others on a real device.",
            )


def _refuse_frozen(module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            "no parameter is trainable.",
            where=type(module).__name__,
            fix="Unfreeze some, or give the strategy lora=LoraSettings(...).",
        )
