"""Bytes that stay through a step: weights, gradients, optimizer states, on one rank and in host memory."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.shape import ModelShape

__all__ = ["INT8", "NF4", "Share", "States", "lora_parameters", "model_states", "share", "states"]

# Packed halves, one byte of scale per 64 weights, and an FP32 scale per 256 of those (Dettmers et al. 2023, QLoRA).
NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
# One byte, and an FP32 scale per row: too little to count.
INT8 = 1.0
# Moments of 8-bit Adam: two bytes, and two FP32 scales per 256 elements (Dettmers et al. 2022).
_EIGHT_BIT = 2 + 2 * 4 / 256


@dataclass(frozen=True)
class Share:
    """Parameters that one pipeline stage and tensor rank owns, before data-parallel sharding.

    Args:
        kinds: Its layers, in order: sparse or dense.
        quantisable: In matrices of blocks that are linear layers.
        blocks: All others in blocks.
        ends: Embedding, head, last norm, positions and vision tower.
        adapters: LoRA.
        embedding: The embedding, if it is here.
        head: The head, if it is here and not tied.
        first: Embeds the tokens.
        last: Computes the loss.
    """

    kinds: tuple[bool, ...]
    quantisable: float
    blocks: float
    ends: float
    adapters: float
    embedding: float
    head: float
    first: bool = True
    last: bool = True

    @property
    def base(self) -> float:
        """All but adapters."""
        return self.quantisable + self.blocks + self.ends


@dataclass(frozen=True)
class States:
    """Bytes on one GPU and on its host that stay through the whole step (gradients: once they are complete).

    Args:
        weights: Unquantised.
        quantised: Packed, with scales.
        adapters: Of LoRA.
        gradients: After the backward pass.
        optimizer: Moments and masters.
        temporary: What the optimizer step adds for a moment.
        host: In host memory for this rank.
        disk: On NVMe for this rank.
        trained: Elements that this rank's optimizer updates.
    """

    weights: float
    quantised: float
    adapters: float
    gradients: float
    optimizer: float
    temporary: float
    host: float
    disk: float
    trained: float

    @property
    def always(self) -> float:
        """On the GPU at every moment."""
        return self.weights + self.quantised + self.adapters + self.optimizer


def model_states(parameters: float, ranks: int, stage: int, *, sizes: tuple[float, float, float] = (2, 2, 12)) -> float:
    """Bytes per GPU of weights, gradients and optimizer states under ZeRO.

    Args:
        parameters: Trainable parameters.
        ranks: Data-parallel ranks.
        stage: 0 (plain data parallelism) to 3.
        sizes: Bytes per parameter of weight, gradient, states; by default those of Rajbhandari et al. 2020, "ZeRO:
            Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
    """
    weight, gradient, state = sizes
    return parameters * (
        weight / (ranks if stage >= 3 else 1)
        + gradient / (ranks if stage >= 2 else 1)
        + state / (ranks if stage >= 1 else 1)
    )


def lora_parameters(shape: ModelShape, r: int, *, sparse: bool, dora: bool = False) -> int:
    """LoRA elements of one layer with adapters at all its linear layers (fused experts are none)."""
    h, q, kv = shape.hidden, shape.q, shape.kv
    pairs = [(h, q + 2 * kv), (q, h)] if shape.family.fused_qkv else [(h, q), (h, kv), (h, kv), (q, h)]
    width = shape.shared_intermediate if sparse else shape.intermediate
    if width:
        pairs += [(h, width)] * (shape.matrices - 1) + [(width, h)]
    return sum(r * (fan_in + fan_out) + (fan_out if dora else 0) for fan_in, fan_out in pairs)


def share(job: Job, layout: Layout, stage: int = 0, *, layers: int | None = None) -> Share:
    """What pipeline stage ``stage`` of the layout owns on one tensor rank.

    Args:
        job: The model and goal.
        layout: Sizes.
        stage: Pipeline rank.
        layers: Number of its layers; by default an even split.
    """
    shape, tensor, stages = job.shape, layout.tensor, layout.pipeline
    first, last = stage == 0, stage == stages - 1
    start, end = _bounds(shape.layers, stages, stage) if layers is None else (stage * layers, (stage + 1) * layers)
    kinds = shape.sparse[start:end]
    quantisable = blocks = adapters = 0.0
    for sparse in kinds:
        linear = shape.attention_linear + _linear_mlp(shape, sparse=sparse)
        quantisable += linear / tensor
        blocks += (shape.layer_parameters(sparse) - linear - shape.layer_small(sparse)) / tensor
        blocks += shape.layer_small(sparse)
        adapters += 0 if job.trains_all else lora_parameters(shape, job.lora_r, sparse=sparse, dora=job.dora)
    embedding = shape.embedding / tensor if first or (last and shape.tied) else 0
    head = shape.head / tensor if last else 0
    norm = shape.hidden * (2 if shape.family.norm == "layer" else 1) if last else 0
    learned = shape.positions * shape.hidden if first and shape.family.learned_positions else 0
    tower = shape.tower.parameters if first and shape.tower else 0
    # Half of a LoRA pair is cut with the matrix beside it, half stays whole.
    adapters = adapters if tensor == 1 else adapters * (1 + 1 / tensor) / 2
    ends = embedding + head + norm + learned + tower
    return Share(kinds, quantisable, blocks, ends, adapters, embedding, head, first, last)


def _bounds(layers: int, stages: int, stage: int) -> tuple[int, int]:
    # The last stages take the remainder's place last: they have the head to compute.
    base, extra = divmod(layers, stages)
    start = stage * base + min(stage, extra)
    return start, start + base + (1 if stage < extra else 0)


def _linear_mlp(shape: ModelShape, *, sparse: bool) -> int:
    width = shape.shared_intermediate if sparse else shape.intermediate
    return shape.matrices * shape.hidden * width


def states(job: Job, layout: Layout, part: Share) -> States:
    """What the strategy keeps of a share, by its rules for sharding and offloading."""
    full = job.precision == "32-true"
    true = job.precision == "bf16-true"
    stage = {"zero1": 1, "zero2": 2, "zero3": 3}.get(layout.strategy, 3 if layout.strategy in ("fsdp", "tp_pp") else 0)
    ranks = layout.shard
    cut = ranks if stage >= 3 else 1
    trained = part.base if job.trains_all else part.adapters
    master = 2 if true else 4
    # DeepSpeed keeps BF16 weights beside FP32 masters; the others keep the masters alone.
    zero = layout.strategy.startswith("zero")
    weight = 4 if full else 2 if zero or true else 4
    base = 2.0 if not job.trains_all and not full else weight
    quantised = part.quantisable * NF4 / cut if job.goal == "qlora" else 0.0
    weights = (part.base - (part.quantisable if job.goal == "qlora" else 0)) * base / cut
    adapters = part.adapters * weight / cut
    moments = trained * _moment(job, master) / (ranks if stage >= 1 else 1)
    masters = trained * 4 / ranks if zero and not (full or true) else 0.0
    gradients = 0.0 if job.optimizer_in_backward else trained * master / (ranks if stage >= 2 else 1)
    temporary = _temporary(job, trained * master / (ranks if stage >= 1 else 1))
    return _offloaded(layout, weights, quantised, adapters, gradients, moments + masters, temporary, trained / cut)


def _moment(job: Job, size: float) -> float:
    return {"adamw": 2 * size, "adamw_fused": 2 * size, "adamw_8bit": _EIGHT_BIT, "sgd": 0.0}[job.optimizer]


def _temporary(job: Job, updated: float) -> float:
    # torch's multi-tensor AdamW, the default on a GPU, makes one more tensor of each parameter's size at a time for
    # all of them together; the fused one makes none.
    return updated if job.optimizer == "adamw" and not job.optimizer_in_backward else 0.0


def _offloaded(
    layout: Layout,
    weights: float,
    quantised: float,
    adapters: float,
    gradients: float,
    optimizer: float,
    temporary: float,
    trained: float,
) -> States:
    host = disk = 0.0
    if layout.offload != "none":
        # The optimizer runs on the host: its states, its gradients and its temporaries are there. Stage 3 has a second
        # copy of the gradients there, stage 2 one of the new BF16 weights.
        copies = {"zero3": 2.0, "zero2": 1.5}.get(layout.strategy, 1.0)
        host, optimizer, temporary = optimizer + copies * gradients, 0.0, 0.0
        if layout.offload == "nvme":
            disk, host = host - gradients, gradients + min(host - gradients, 4 * 5 * 1e8)
        # Stage 2 adds its part up on the card all the same.
        gradients = gradients if layout.strategy in ("zero1", "zero2") else 0.0
    if layout.offload == "cpu":
        host += weights + quantised + adapters
        weights = quantised = adapters = 0.0
    return States(weights, quantised, adapters, gradients, optimizer, temporary, host, disk, trained)
