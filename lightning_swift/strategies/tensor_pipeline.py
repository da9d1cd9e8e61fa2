"""Tensor, sequence and pipeline parallelism with FSDP2 or HSDP on what is left, for unmodified LightningModules."""

from __future__ import annotations

from lightning_swift.adapters.settings import LoraSettings, Quantization
from lightning_swift.parallel.dtypes import PrecisionName, ReduceName
from lightning_swift.parallel.memory import ReturnMemory
from lightning_swift.parallel.mesh import AxisSize
from lightning_swift.parallel.schedule import ScheduleName
from lightning_swift.parallel.sharding import Reshard
from lightning_swift.strategies._checkpoint_frozen import SaveFrozen, check_save_frozen
from lightning_swift.strategies._options import options_among
from lightning_swift.strategies._tensor_pipeline import TensorPipelineEngine
from lightning_swift.strategies._tensor_pipeline_options import (
    LossFunction,
    Microbatches,
    StageBalance,
    TensorPipelineOptions,
)

__all__ = ["TensorPipelineStrategy"]


class TensorPipelineStrategy(TensorPipelineEngine):
    """Trains a Hugging Face causal language model cut into stages of layers, each layer cut over several ranks.

    The LightningModule holds one such model and nothing else that trains. Its steps call ``self.model(**batch)`` with
    ``labels`` in the batch and depend on the model through ``out.loss`` alone: the forward and backward passes of all
    stages run inside that call, and the backward pass of the loss hands the gradients out. Every rank sees the loss.
    ``out.logits`` raises an error in training; see ``gather_logits`` for evaluation.

    Ranks of one model-parallel group get the same batches: ``trainer.distributed_sampler_kwargs`` counts data-parallel
    ranks. Ranks next to each other are tensor-parallel, those farthest apart are stages.

    The Trainer's ``gradient_clip_val``, ``self.clip_gradients`` and :meth:`gradient_norm` know the gradients of all
    stages; what a step hook of your own computes of ``self.parameters()``, such as torch's ``clip_grad_norm_``, sees
    those of one rank. Tensor-parallel ranks draw the same dropout masks. Optimizers that look at each element by itself
    step as in one process; LBFGS is refused, Adafactor and Rprop too where parameters are cut over ranks or cast.

    Also by name: ``Trainer(strategy="swift_tp_pp")``, which means BF16.

    Args:
        precision: As for :class:`FSDPBF16Strategy`.
        tensor_parallel_size: Number of ranks that each layer is cut over; must divide the key/value heads. They talk
            in every layer, so they should be those of one machine. ``"auto"``: what the other sizes leave, or the
            ranks of one machine if ``data_parallel_shard`` is ``"auto"`` too.
        pipeline_parallel_size: Number of ranks that the layers are dealt out to. ``"auto"``: what the other sizes
            leave, or the number of machines if another size is ``"auto"`` too.
        sequence_parallel: Also cut the activations between the blocks, along the sequence, over the tensor-parallel
            ranks: less memory for the same traffic.
        loss_parallel: Keep the logits cut along the vocabulary while the loss is computed.
        tp_plan: How modules are cut that the model's published plan does not name, or names otherwise: pattern of
            names (``"model.layers.*.mlp.gate"``) to style (``"colwise"``, ``"rowwise"``, ...).
        schedule: Order of the microbatches in the pipeline. ``"1F1B"`` needs least memory; ``"Interleaved1F1B"`` and
            ``"InterleavedZeroBubble"`` give each rank several stages to wait less; ``"ZBVZeroBubble"`` and
            ``"DualPipeV"`` lay two stages per rank along a V.
        microbatches: Number of parts that each batch is cut into; a batch with fewer rows is padded, which costs
            time. ``"auto"``: four for each pipeline rank.
        virtual_stages: Stages per rank, for interleaved schedules; two if left out.
        stage_balance: Number of layers of each stage, first stage first; ``"auto"`` balances their cost, embedding
            and head included.
        loss_fn: A loss of logits ``[rows, length, vocabulary]`` and labels ``[rows, length]`` to use in place of the
            model's own, as a function or the path of one (``"package.module.function"``). Called with one microbatch
            on the last stage; the loss of a batch is their mean, weighted by the number of target tokens.
        gather_logits: Give ``out.logits`` on every rank in validation, test and prediction. Costs a message of the
            size of the logits for each batch.
        data_parallel_shard: Number of ranks that parameters, gradients and optimizer state of each stage are sharded
            over; ``"auto"`` for all that the other sizes leave.
        data_parallel_replicate: Number of copies of that (hybrid sharding).
        reduce_dtype: As for :class:`FSDPBF16Strategy`.
        cpu_offload: As for :class:`FSDPBF16Strategy`.
        reshard_after_forward: Free gathered parameters after each microbatch's pass through a layer, and gather them
            again for the next; ``"auto"`` keeps them for the whole step. Not with schedules that split the backward
            pass, which would lose gradients.
        return_freed_memory: As for :class:`FSDPBF16Strategy`.
        compile: Backend for ``torch.compile`` of each block, or None. Not with tensor parallelism and activation
            checkpointing together, which torch 2.13 cannot compile.
        check_batches: Compare the first batch of each kind over the ranks of each model-parallel group, and refuse
            to train on different ones.
        self_check: Before layers are cut, compute one of each kind whole and cut and compare, which also finds
            parameters whose gradients must be summed though no plan says so. Takes the memory of one whole layer in
            FP32 on every rank; switch it off where an architecture and its plan have been checked at a smaller size.
        process_group_backend: ``"nccl"``, ``"gloo"``...; None chooses by device.
        timeout: Seconds after which a collective that not all ranks have joined is an error. A rank that raises ends
            the others within half a minute.
        lora: As for :class:`FSDPBF16Strategy`; each stage gets the adapters of its own layers.
        quantization: Not yet together with sharding; here so that it is refused with a reason.
        save_frozen: As for :class:`FSDPBF16Strategy`.

    Raises:
        ConfigurationError: A value that is not allowed, or options that contradict each other, the Trainer's
            precision, the rules of the schedule or the number of ranks.
        ModelError: When the model is set up: it has fewer layers than stages, cannot be split, has no plan, or cannot
            be cut over that many ranks. Raised on all ranks before any communication.
    """

    def __init__(
        self,
        precision: PrecisionName = "bf16-mixed",
        *,
        tensor_parallel_size: AxisSize = "auto",
        pipeline_parallel_size: AxisSize = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        tp_plan: dict[str, str] | None = None,
        schedule: ScheduleName = "1F1B",
        microbatches: Microbatches = "auto",
        virtual_stages: int | None = None,
        stage_balance: StageBalance = "auto",
        loss_fn: str | LossFunction | None = None,
        gather_logits: bool = False,
        data_parallel_shard: AxisSize = "auto",
        data_parallel_replicate: AxisSize = 1,
        reduce_dtype: ReduceName = "float32",
        cpu_offload: bool = False,
        reshard_after_forward: Reshard = "auto",
        return_freed_memory: ReturnMemory = "auto",
        compile: str | None = None,
        check_batches: bool = True,
        self_check: bool = True,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
        lora: LoraSettings | None = None,
        quantization: Quantization | None = None,
        save_frozen: SaveFrozen = "auto",
    ) -> None:
        options = options_among(locals())
        self.save_frozen = check_save_frozen(save_frozen)
        super().__init__(TensorPipelineOptions(**options))
