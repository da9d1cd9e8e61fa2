"""What is to be trained on what (:class:`Job`), and one way of doing it (:class:`Layout`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner._arithmetic import Adapter, Arithmetic
from lightning_swift.planner.activations import Checkpointing, Loss, StepOptions
from lightning_swift.planner.hardware import GPU
from lightning_swift.planner.shape import ModelShape

__all__ = ["Goal", "Job", "Layout", "Offload", "OptimizerName", "Precision", "StrategyName", "arithmetic", "shards"]

Goal = Literal["full", "lora", "qlora", "pretrain"]
StrategyName = Literal["ddp", "fsdp", "zero1", "zero2", "zero3", "tp_pp"]
Offload = Literal["none", "optimizer", "cpu", "nvme"]
Precision = Literal["bf16-mixed", "bf16-true", "32-true"]
OptimizerName = Literal["adamw", "adamw_fused", "adamw_8bit", "sgd"]
# Ten times the largest training runs: more is a slip of the pen.
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Job:
    """What the user wants.

    Args:
        shape: The model.
        gpu: The card.
        gpus: Cards per machine.
        nodes: Machines.
        length: Tokens per sequence.
        goal: ``"full"`` or ``"pretrain"`` train all weights; ``"lora"``; ``"qlora"`` over NF4 weights.
        global_batch: Sequences per optimizer step, None for whatever one micro-batch on each rank gives.
        precision: As the strategies name it.
        optimizer: ``"adamw"`` is torch's default, which makes a temporary as large as the gradients.
        lora_r: Rank of adapters.
        dora: Adapters with magnitudes.
        dropout: Dropout in front of adapters.
        loss: How logits and loss are computed.
        chunk: Tokens of a chunk of the loss.
        host_memory: Bytes of host memory per machine.
        network: Bytes per second between machines and per card.
        optimizer_in_backward: Each layer's weights are updated in the backward pass, and its gradients freed.

    Raises:
        ConfigurationError: An impossible size.
    """

    shape: ModelShape
    gpu: GPU
    gpus: int = 1
    nodes: int = 1
    length: int = 2048
    goal: Goal = "full"
    global_batch: int | None = None
    precision: Precision = "bf16-mixed"
    optimizer: OptimizerName = "adamw"
    lora_r: int = 16
    dora: bool = False
    dropout: bool = False
    loss: Loss = "huggingface"
    chunk: int = 1024
    host_memory: float = 0.0
    network: float = 0.0
    optimizer_in_backward: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "length", "lora_r", "chunk"):
            _at_least_one(name, getattr(self, name))
        if self.global_batch is not None:
            _at_least_one("global_batch", self.global_batch)
        if self.world > _MOST_RANKS:
            raise ConfigurationError(f"{self.world} GPUs are more than {_MOST_RANKS}.", where="plan")
        if self.shape.family.learned_positions and self.length > self.shape.positions:
            raise ConfigurationError(
                f"{self.shape.name} has {self.shape.positions} learned positions, too few for {self.length} tokens.",
                where="plan",
            )
        for name, allowed in (("goal", Goal), ("precision", Precision), ("optimizer", OptimizerName), ("loss", Loss)):
            _one_of(name, getattr(self, name), get_args(allowed))
        for name in ("host_memory", "network"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is below 0.", where="plan")

    @property
    def world(self) -> int:
        """Ranks."""
        return self.gpus * self.nodes

    @property
    def trains_all(self) -> bool:
        """No adapters."""
        return self.goal in ("full", "pretrain")

    @property
    def host_bytes(self) -> float:
        """Host memory of a machine."""
        return self.host_memory or self.gpu.host_memory * 1e9 * self.gpus

    @property
    def network_bytes(self) -> float:
        """Bytes per second between machines and per card."""
        return self.network or self.gpu.network * 1e9


@dataclass(frozen=True)
class Layout:
    """One way of doing it.

    Args:
        strategy: Which bundle.
        batch: Sequences per rank and micro-batch.
        accumulate: Micro-batches per optimizer step.
        checkpointing: What blocks keep.
        offload: ``"optimizer"``: states in host memory; ``"cpu"``: weights too; ``"nvme"``: states on disk.
        shard: Ranks that share one copy of the states.
        replicate: Copies of it.
        tensor: Ranks that share each matrix.
        pipeline: Stages.
        microbatches: Parts of ``batch`` that run through the pipeline one after another.
        schedule: Of the pipeline.
        sequence: Sequence parallelism beside tensor parallelism.
        loss_parallel: Logits stay cut.
        reduce_bucket: Elements of ZeRO's gradient bucket; 0 takes what ``configs/deepspeed`` gives.
        prefetch_bucket: Elements that ZeRO-3 gathers ahead; 0 as above.
        persistence: Largest parameter that ZeRO-3 keeps whole on each rank; 0 as above.

    Raises:
        ConfigurationError: An impossible size.
    """

    strategy: StrategyName
    batch: int = 1
    accumulate: int = 1
    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    shard: int = 1
    replicate: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1
    schedule: str = "1F1B"
    sequence: bool = False
    loss_parallel: bool = False
    reduce_bucket: int = 0
    prefetch_bucket: int = 0
    persistence: int = 0
    virtual: int = field(default=1)

    def __post_init__(self) -> None:
        for name in ("batch", "accumulate", "shard", "replicate", "tensor", "pipeline", "microbatches", "virtual"):
            _at_least_one(name, getattr(self, name))
        _one_of("strategy", self.strategy, get_args(StrategyName))

    @property
    def data(self) -> int:
        """Ranks that see different sequences."""
        return self.shard * self.replicate

    def micro_options(self, job: Job) -> StepOptions:
        """What runs on the tape: one micro-batch (of the pipeline, where there is one)."""
        return StepOptions(
            arithmetic=arithmetic(job, self),
            batch=max(1, self.batch // self.microbatches),
            length=job.length,
            checkpointing=self.checkpointing,
            loss=job.loss,
            chunk=job.chunk,
            tensor=self.tensor,
            sequence=self.sequence,
            loss_parallel=self.loss_parallel,
            accumulate=self.keeps_gradients,
        )

    @property
    def keeps_gradients(self) -> bool:
        """New gradients are added to those that are there before the backward pass begins: DDP's buckets."""
        return self.strategy == "ddp"


def shards(job: Job, layout: Layout) -> bool:
    """Whether the strategy applies ``fully_shard``: stages of which nothing is cut, cast or offloaded go without."""
    whole = layout.data == 1 and layout.tensor == 1 and job.precision == "32-true" and layout.offload == "none"
    return layout.strategy == "fsdp" or (layout.strategy == "tp_pp" and not whole)


def arithmetic(job: Job, layout: Layout) -> Arithmetic:
    """In which sizes operators compute: DDP casts FP32 weights for each product, the others see BF16 ones."""
    full = job.precision == "32-true"
    adapter_size = 4 if full or (layout.strategy == "ddp" and job.precision == "bf16-mixed") else 2
    adapter = None if job.trains_all else Adapter(job.lora_r, adapter_size, job.dropout, job.dora)
    casts = layout.strategy == "ddp" and job.precision == "bf16-mixed"
    weight = 4 if full or (casts and job.trains_all) else 2
    quantised = "nf4" if job.goal == "qlora" else "none"
    return Arithmetic(
        weight=weight,
        compute=4 if full else 2,
        autocast=casts,
        quantised="nf4" if quantised == "nf4" else "none",
        adapter=adapter,
    )


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r} is not a whole number of at least 1.", where="plan")


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.", where="plan")
