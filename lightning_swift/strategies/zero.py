"""DeepSpeed's ZeRO for any LightningModule, without the faults of Lightning's own strategy for it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.optimizers import keep_trainable
from lightning_swift.adapters.settings import LoraSettings, Quantization
from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.parallel.dtypes import PrecisionName, ReduceName
from lightning_swift.parallel.memory import ReturnMemory, return_freed_memory, returning_freed_memory
from lightning_swift.parallel.sharding import refuse_scalars
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen, check_save_frozen
from lightning_swift.strategies._options import options_among
from lightning_swift.strategies._precision import OwnPrecision
from lightning_swift.strategies._unread import LeavesUnread
from lightning_swift.strategies._zero_config import (
    DeepSpeedConfig,
    TrainerFacts,
    base_config,
    complete_config,
    hidden_size,
    size_buckets,
)
from lightning_swift.strategies._zero_engine import choose_accelerator, inference_config, start_engine
from lightning_swift.strategies._zero_loading import known_to_transformers, load_and_place, loading_config
from lightning_swift.strategies._zero_ops import ops_for, prepare_ops
from lightning_swift.strategies._zero_optimizer import (
    check_elementwise,
    check_single,
    offloaded_adam,
    use_fused_kernels,
    users_optimizers,
)
from lightning_swift.strategies._zero_options import (
    AutoSwitch,
    BucketSize,
    OptimizerOffload,
    ParamOffload,
    ZeROOptions,
    ZeROStage,
)
from lightning_swift.strategies._zero_precision import ZeROPrecision, cast_inputs
from lightning_swift.strategies._zero_state import ZeroCheckpointing

__all__ = ["ZeROStrategy"]


class ZeROStrategy(ZeroCheckpointing, LeavesUnread, OwnPrecision, DeepSpeedStrategy):
    """Cuts optimizer state (stage 1), gradients (2) and parameters (3) over all ranks, with offload to host or disk.

    Also by name: ``swift_zero1``, ``swift_zero2``, ``swift_zero3`` and ``swift_zero3_offload``, which mean BF16.

    Hugging Face models are partitioned while they are loaded, by ``lazy_pretrained`` as by ``from_pretrained`` in
    ``configure_model``; buffers keep their dtype. The user's optimizer and schedulers are used: with offload, torch's
    Adam and AdamW run as DeepSpeed's vectorised Adam for host memory, else with torch's fused kernels. Lightning
    decides which microbatch ends an accumulation, and DeepSpeed divides no loss a second time.

    Args:
        stage: 1 cuts optimizer state, 2 gradients too, 3 parameters too. None: what ``config`` says, else 3.
        precision: ``"bf16-mixed"``: parameters in BF16, FP32 master weights (made from the BF16 ones) and moments.
            ``"bf16-true"``: master weights and moments in BF16 too. ``"32-true"``: everything in FP32.
        offload_optimizer: Where optimizer state lies and the optimizer runs: ``"none"`` (on the device), ``"cpu"``, or
            ``"nvme"`` (stage 3 only; states of less than 1 MiB stay in host memory).
        offload_params: ``"cpu"`` keeps stage 3's partitions in host memory.
        nvme_path: Folder on a fast local disk, for ``"nvme"``.
        pin_memory: Page-locked host buffers, for faster copies; ``"auto"`` on GPUs.
        overlap_comm: Reduce gradients while the backward pass goes on; ``"auto"`` on GPUs.
        contiguous_gradients: Copy gradients into one buffer as they come, against fragmentation.
        reduce_bucket_size: Elements reduced at once; ``"auto"`` is the square of the hidden size, at least 2^20.
        allgather_bucket_size: Elements gathered at once after a step of stages 1 and 2.
        prefetch_bucket_size: Elements that stage 3 gathers ahead; ``"auto"`` is 0.9 of the square of the hidden size.
        persistence_threshold: Parameters of stage 3 with fewer elements stay whole; ``"auto"`` is 10 x the hidden size.
        sub_group_size: Elements that stage 3's optimizer steps on at once, from host memory or disk.
        reduce_dtype: Dtype in which gradients are summed over ranks. ``"bfloat16"`` halves that traffic and loses
            precision.
        lora: Adapters to put into the module's Hugging Face model.
        quantization: How the frozen linear layers under the adapters are stored: ``"nf4"`` or ``"int8"``.
        double_quant: With ``"nf4"``, quantise the scales as well.
        return_freed_memory: Have the C library give large freed blocks back at once; see :class:`FSDPBF16Strategy`.
        config: A DeepSpeed configuration: a dictionary, the path of a JSON file, or the name of a shipped one
            (``"z3_offload"``). ``"auto"`` is filled in as by the Hugging Face Trainer. Options given here are merged
            in; what contradicts them or the Trainer is refused.
        process_group_backend: ``"nccl"``, ``"gloo"``...; None chooses by device.
        timeout: Seconds after which a collective that not all ranks have joined is an error.

    Attributes:
        activation_checkpointing: Set by the callback of that name before the model is set up.
        chosen_by_name: True if the strategy was built from its registered name, so that the Trainer's precision
            decides between the BF16 ones.
        loads_lazy_weights: Tells modules that they may build lazily: weights are read while they are partitioned.

    Raises:
        ConfigurationError: A value that is not allowed, or options that contradict each other, ``config`` or the
            Trainer.
    """

    loads_lazy_weights = True

    def __init__(
        self,
        stage: ZeROStage | None = None,
        precision: PrecisionName = "bf16-mixed",
        *,
        offload_optimizer: OptimizerOffload | None = None,
        offload_params: ParamOffload | None = None,
        nvme_path: str | None = None,
        pin_memory: AutoSwitch = "auto",
        overlap_comm: AutoSwitch = "auto",
        contiguous_gradients: bool = True,
        reduce_bucket_size: BucketSize = "auto",
        allgather_bucket_size: BucketSize = "auto",
        prefetch_bucket_size: BucketSize = "auto",
        persistence_threshold: BucketSize = "auto",
        sub_group_size: BucketSize = "auto",
        reduce_dtype: ReduceName = "float32",
        lora: LoraSettings | None = None,
        quantization: Quantization | None = None,
        double_quant: bool = True,
        save_frozen: SaveFrozen = "auto",
        return_freed_memory: ReturnMemory = "auto",
        config: str | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        options = options_among(locals())
        self.save_frozen = check_save_frozen(save_frozen)
        self.options = ZeROOptions(**options)
        self._base = base_config(self.options)
        self.activation_checkpointing: CheckpointingSettings | None = None
        self._precision = ZeROPrecision(precision)
        self._gradient_factor = 1.0
        super().__init__(
            config=self._base, process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout)
        )

    @override
    def _use_precision(self, precision: PrecisionName) -> None:
        self.options = replace(self.options, precision=precision)
        self._precision = ZeROPrecision(precision)

    @property
    @override
    def zero_stage_3(self) -> bool:
        return self.stage == 3

    @property
    def stage(self) -> int:
        """The ZeRO stage: 1, 2 or 3."""
        stage: int = self.options.stage or self._base["zero_optimization"].get("stage", 3)
        return stage

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """Lightning decides which microbatch ends a window, so that an epoch's last one need not be full."""
        return False

    @property
    def _optimizer_offload(self) -> str:
        given = (self._base["zero_optimization"].get("offload_optimizer") or {}) if self.options.config else {}
        return self.options.offload_optimizer or str(given.get("device", "none"))

    @property
    def _returns_memory(self) -> bool:
        # Elsewhere gathered parameters are not in host memory, or nothing is gathered.
        on_cpu = self.root_device.type == "cpu" and self.world_size > 1 and self.zero_stage_3
        return on_cpu if self.options.return_freed_memory == "auto" else self.options.return_freed_memory

    @override
    def setup_environment(self) -> None:
        if self._returns_memory:
            return_freed_memory()
        choose_accelerator(self.root_device.type)
        # Past Lightning's own check, which refuses every device but CUDA.
        super(DeepSpeedStrategy, self).setup_environment()

    @override
    def setup_distributed(self) -> None:
        prepare_ops(ops_for(device_type=self.root_device.type, offload=self._optimizer_offload))
        if self.root_device.type != "cpu":
            # Checks the indices of devices, which those of CPUs have not.
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None]:
        with super(DeepSpeedStrategy, self).tensor_init_context(empty_init=empty_init):
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None]:
        # Never Lightning's zero.Init: round transformers it rounds rotary tables, and round a quantised load it aborts.
        config = self._complete_config()
        # What is rounded, packed or cut up later must be in blocks that can go back one by one.
        with returning_freed_memory(afterwards=self._returns_memory):
            if self.options.adapters.quantization is not None:
                # What is to be quantised must be whole; it is cut up when it has been packed.
                yield
                return
            with known_to_transformers(loading_config(config)):
                yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        self.config = self._complete_config()
        with known_to_transformers(loading_config(self.config)):
            self._apply(module)
        size_buckets(self.config, hidden_size(module))
        _check_clipping(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._start_training(module)
        else:
            self.model, _ = start_engine(
                module, inference_config(self.config), optimizer=None, local_rank=self.local_rank
            )
        self.barrier()

    def _apply(self, module: pl.LightningModule) -> None:
        """The order of transforms. The model has been built, with or without weights."""
        if self._layer_sync is not None:
            self._layer_sync.apply(module)
        refuse_scalars(module)
        with returning_freed_memory(afterwards=self._returns_memory):
            self._adapt(module)
            load_and_place(module, self._config, device=self.root_device, dtype=self.options.policy.compute_dtype)
        cast_inputs(module, self.options.policy.compute_dtype)
        if self.activation_checkpointing is not None:
            apply_checkpointing(module, self.activation_checkpointing)

    def _adapt(self, module: pl.LightningModule) -> None:
        report = apply_adapters(module, self.options.adapters, compute_dtype=self.options.policy.compute_dtype)
        if report.injected:
            rank_zero_info(f"{type(self).__name__}: {report}")

    def _start_training(self, module: pl.LightningModule) -> None:
        optimizers, schedulers = users_optimizers(module)
        optimizer = check_single(optimizers)
        check_elementwise(optimizer)
        keep_trainable(optimizer, [config.scheduler for config in schedulers])
        optimizer = self._suited(optimizer)
        self.model, wrapped = start_engine(module, self._config, optimizer=optimizer, local_rank=self.local_rank)
        self._engine.set_gradient_accumulation_boundary(True)
        self.optimizers = [wrapped]
        self.lr_scheduler_configs = schedulers
        rank_zero_info(f"{type(self).__name__}: stage {self.stage}, {self.options.policy}")

    def _suited(self, optimizer: Optimizer) -> Optimizer:
        if "offload_optimizer" not in self._config["zero_optimization"]:
            use_fused_kernels(optimizer)
            return optimizer
        suited = offloaded_adam(optimizer, bf16_states=self.options.precision == "bf16-true")
        if suited is not optimizer:
            rank_zero_info(
                f"{type(self).__name__}: {type(optimizer).__name__} runs as DeepSpeedCPUAdam in host memory, with the "
                "same groups and hyper-parameters."
            )
        return suited

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None]:
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def scale_gradients(self, factor: float) -> None:
        """Have the coming optimizer step see every gradient multiplied by ``factor``, clipping included."""
        self._gradient_factor = factor

    def take_gradient_factor(self) -> float:
        """What the gradients of this step are to be multiplied by; 1 for the steps after it."""
        factor, self._gradient_factor = self._gradient_factor, 1.0
        return factor

    @property
    def _engine(self) -> Any:
        return self.model

    @property
    def _config(self) -> DeepSpeedConfig:
        assert isinstance(self.config, dict)
        return self.config

    def _complete_config(self) -> DeepSpeedConfig:
        trainer = self._trainer
        facts = TrainerFacts(
            world_size=self.world_size,
            accumulate=trainer.accumulate_grad_batches,
            clip=trainer.gradient_clip_val,
            on_gpu=self.root_device.type != "cpu",
        )
        config = complete_config(self._base, self.options, facts)
        config["zero_optimization"]["stage"] = self.stage
        return config


def _check_clipping(trainer: pl.Trainer) -> None:
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
        raise ConfigurationError(
            "DeepSpeed clips gradients by their common norm, not by value.",
            where='Trainer(gradient_clip_algorithm="value")',
            fix='Use gradient_clip_algorithm="norm", or FSDPBF16Strategy, which does both.',
        )
