"""FSDP2 with BF16 compute and FP32 master weights: the preset most users want."""

from __future__ import annotations

from lightning_swift.adapters.settings import LoraSettings, Quantization
from lightning_swift.parallel.dtypes import PrecisionName, ReduceName
from lightning_swift.parallel.memory import ReturnMemory
from lightning_swift.parallel.mesh import AxisSize
from lightning_swift.parallel.sharding import Reshard
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen, check_save_frozen
from lightning_swift.strategies._mesh import MeshStrategy
from lightning_swift.strategies._options import MeshOptions

__all__ = ["FSDPBF16Strategy"]


class FSDPBF16Strategy(MeshStrategy):
    """Shards parameters, gradients and optimizer state of any LightningModule over all ranks.

    Also by name: ``Trainer(strategy="swift_fsdp_bf16")``, which means BF16.

    Args:
        precision: ``"bf16-mixed"``: BF16 compute with FP32 master weights and moments. ``"bf16-true"``: weights and
            moments in BF16 too, half the memory, less exact. ``"32-true"``: everything in FP32.
        data_parallel_shard: Number of ranks that one copy of the model is cut over; ``"auto"`` for all that
            ``data_parallel_replicate`` leaves.
        data_parallel_replicate: Number of such copies. More than 1 (hybrid sharding) confines the gathering of
            parameters to groups of ``data_parallel_shard`` neighbouring ranks, such as those of one machine, at the
            price of that many times more memory.
        reduce_dtype: Dtype in which gradients are summed over ranks. ``"bfloat16"`` halves that traffic and loses
            precision.
        cpu_offload: Keep shards, gradients and optimizer state in host memory; the optimizer then runs there.
        reshard_after_forward: Free gathered parameters after the forward pass; False trades memory for one gathering
            less. ``"auto"`` keeps only the head and the outermost group, which the backward pass needs at once.
        accumulate_without_sync: With ``accumulate_grad_batches``, reduce gradients only with the last micro-batch.
            Saves traffic and costs one whole unsharded gradient (in ``reduce_dtype``) on every rank.
        return_freed_memory: Have the C library give large freed blocks back at once. On CPU ranks only this makes
            sharding save memory; it costs time for every large tensor, most with small batches. ``"auto"`` does so
            where several ranks compute on the CPU.
        compile: Backend for ``torch.compile`` of each block (``"inductor"``, ``"aot_eager"``), or None.
        block_classes: Names of the classes to gather and compile one by one, where the repeated blocks that are
            found automatically are not the right ones.
        save_frozen: Whether checkpoints repeat frozen weights that are those of the pretrained folder. ``"auto"``
            leaves them out of models with adapters: the checkpoint then names the folder and its content, and resuming,
            merging and exporting need it. Whatever is not in the folder as it is in memory is saved in any case.
        process_group_backend: ``"nccl"``, ``"gloo"``...; None chooses by device.
        timeout: Seconds after which a collective that not all ranks have joined is an error.
        lora: Adapters to put into the Hugging Face model of the module; nothing else is trained then, and the frozen
            weights are kept in the dtype of the computation. None for none; adapters that ``configure_model`` has
            made with peft are trained as they are.
        quantization: Not yet together with sharding; here so that it is refused with a reason.

    Raises:
        ConfigurationError: A value that is not allowed, or options that contradict each other, the Trainer's
            precision or the number of ranks.
    """

    def __init__(
        self,
        precision: PrecisionName = "bf16-mixed",
        *,
        data_parallel_shard: AxisSize = "auto",
        data_parallel_replicate: AxisSize = 1,
        reduce_dtype: ReduceName = "float32",
        cpu_offload: bool = False,
        reshard_after_forward: Reshard = "auto",
        accumulate_without_sync: bool = False,
        return_freed_memory: ReturnMemory = "auto",
        compile: str | None = None,
        block_classes: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        lora: LoraSettings | None = None,
        quantization: Quantization | None = None,
        save_frozen: SaveFrozen = "auto",
    ) -> None:
        self.save_frozen = check_save_frozen(save_frozen)
        super().__init__(
            MeshOptions(
                precision=precision,
                data_parallel_shard=data_parallel_shard,
                data_parallel_replicate=data_parallel_replicate,
                reduce_dtype=reduce_dtype,
                cpu_offload=cpu_offload,
                reshard_after_forward=reshard_after_forward,
                accumulate_without_sync=accumulate_without_sync,
                return_freed_memory=return_freed_memory,
                compile=compile,
                block_classes=None if block_classes is None else tuple(block_classes),
                process_group_backend=process_group_backend,
                timeout=timeout,
                lora=lora,
                quantization=quantization,
            )
        )
