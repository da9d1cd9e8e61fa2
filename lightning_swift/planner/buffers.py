"""Buffers of communication: gathered weights, gradients on their way, buckets. By strategy, at each point of a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_swift._shipped import shipped_folder
from lightning_swift.planner.settings import Job, Layout, shards
from lightning_swift.planner.states import NF4, Share

__all__ = ["Buffers", "buckets", "buffers"]

# DeepSpeed's own default where the written configuration is silent.
_DEFAULT_ALLGATHER = 500_000_000
_DEFAULT_GROUP = 1_000_000_000
# stage3_max_reuse_distance of DeepSpeed, elements: weights needed again that soon stay gathered.
_REUSE = 1_000_000_000
_LEAST_BUCKET = 1 << 20
# Bytes per element in which gradients are summed over ranks, by default under every precision.
_REDUCED = 4
# Elements that DeepSpeed's BF16 optimizer reduces at a time.
_REDUCED_AT_ONCE = 500_000_000


@dataclass(frozen=True)
class Buffers:
    """Bytes at each point.

    Args:
        always: Weights that stay gathered through the whole step.
        forward: While a layer's forward runs.
        gathering: When a layer's weights have arrived: those of the one before, as they came, and as they are used.
        loss: While logits and loss are there.
        held: What the last gather of the forward pass came in, until the loss is there.
        held_longer: The part of it that stays until the loss's gradient is there.
        own: Gathered weights of the layer whose backward runs, freed when it ends.
        ahead: Those of the next layer, gathered ahead.
        ahead_of_first: What is gathered ahead while the first layer's backward runs: the embedding.
        sending: Copies of a layer's gradients on their way, kept until those of the next layer are ready.
        sending_head: The same of the head, kept while the last layer's backward runs.
        embedding: When the embedding's gradient is sent, or made, whichever is more, without that gradient.
        whole: Part of the gradients that stays whole on every rank until the end of the backward pass.
        step: What the strategy adds to the update.
        reduction: After the last micro-batch of a schedule: copies of the gradients of one group on their way.
    """

    always: float = 0.0
    forward: float = 0.0
    gathering: float = 0.0
    loss: float = 0.0
    held: float = 0.0
    held_longer: float = 0.0
    own: float = 0.0
    ahead: float = 0.0
    ahead_of_first: float = 0.0
    sending: float = 0.0
    sending_head: float = 0.0
    embedding: float = 0.0
    whole: bool = False
    reduction: float = 0.0
    step: float = 0.0


def buffers(job: Job, layout: Layout, part: Share) -> Buffers:
    """What the strategy needs besides what the step needs on one GPU."""
    if layout.strategy == "ddp":
        # Gradients live in the buckets themselves (gradient_as_bucket_view).
        return Buffers()
    if layout.strategy == "fsdp":
        return _fsdp(job, layout, part)
    if layout.strategy == "tp_pp":
        return _scheduled(job, layout, part) if shards(job, layout) else Buffers()
    if layout.strategy == "zero3":
        return _zero3(job, layout, part)
    return _zero1(job, part) if layout.strategy == "zero1" else _zero2(job, layout, part)


def _fsdp(job: Job, layout: Layout, part: Share) -> Buffers:
    """FSDP2 as ``parallel/sharding.py`` groups it: each layer, the embedding, the head (kept gathered), the rest."""
    layer, trained = _layer(job, part)
    size = 4 if job.precision == "32-true" else 2
    reduced = _REDUCED
    sending, whole = trained * reduced, trained if job.trains_all else 0.0
    embedding, head = part.embedding * size, part.head * size
    tied = job.shape.tied
    trains = 1.0 if whole else 0.0
    # FP32 copies of the gradient, and this rank's share of their sum.
    sent = trains * part.embedding * reduced * (1 + 1 / layout.shard)
    # Each chunk of the loss sends the head's gradient, instead of adding it to the one that waits.
    chunks = trains * part.head * (reduced - size)
    return Buffers(
        always=embedding if tied else 0.0,
        forward=2 * layer,
        gathering=3 * layer,
        loss=head + (chunks if job.loss == "chunked" else 0.0),
        held=layer if tied else head,
        held_longer=layer if tied else 0.0,
        own=layer,
        ahead=layer,
        ahead_of_first=0.0 if tied else embedding,
        sending=sending,
        sending_head=trains * part.head * reduced,
        # Of a tied weight the peak is the sum of both gradients, before it is sent.
        embedding=sending if tied else max(sent, embedding + sending),
        whole=tied,
    )


def _scheduled(job: Job, layout: Layout, part: Share) -> Buffers:
    """As torch's schedules run FSDP2: weights stay gathered and gradients whole until the last micro-batch is done."""
    layer, trained = _layer(job, part)
    size = 4 if job.precision == "32-true" else 2
    reduced = _REDUCED
    head = part.head * size
    alone, once = layout.data == 1, layout.microbatches == 1
    held = 0.0 if alone or not once else layer if job.shape.tied else head
    # The first group that is reduced: its gathered weights are freed for copies of its gradient and their sum. Of a cut
    # embedding a part of the gradient is taken first.
    first = part.embedding if part.first and job.trains_all else trained
    if part.first and layout.tensor > 1:
        reduction = first * reduced
    else:
        reduction = 0.0 if alone else first * (reduced * (1 + 1 / layout.shard) - size)
    return Buffers(
        always=layer * len(part.kinds) + part.embedding * size + head,
        held=held,
        held_longer=held if job.shape.tied else 0.0,
        reduction=reduction,
    )


def _layer(job: Job, part: Share) -> tuple[float, float]:
    """Bytes of one gathered layer in the dtype of computation, and its trained elements."""
    count = max(1, len(part.kinds))
    size = 4 if job.precision == "32-true" else 2
    packed = NF4 if job.goal == "qlora" else size
    gathered = (part.quantisable * packed + part.blocks * size + part.adapters * size) / count
    trained = (part.quantisable + part.blocks) / count if job.trains_all else part.adapters / count
    return gathered, trained


def _zero1(job: Job, part: Share) -> Buffers:
    """DeepSpeed's BF16 optimizer: gradients are reduced once all are there, in flat copies of this many at a time."""
    trained = part.base if job.trains_all else part.adapters
    size = 2 if job.precision == "bf16-true" else 4
    return Buffers(reduction=min(trained, _REDUCED_AT_ONCE) * size)


def _zero2(job: Job, layout: Layout, part: Share) -> Buffers:
    """Small gradients are collected in buckets, larger ones sent alone; both are cast for the reduction."""
    bucket, size = buckets(job, layout), 4 if job.precision == "32-true" else 2
    cast = 0 if job.precision == "32-true" else _REDUCED
    waiting = bucket["reduce"] * size * bucket["overlap"]
    large = _largest_matrix(job, part)
    head, embedding = (part.head, part.embedding) if job.trains_all else (0.0, 0.0)
    offloads = layout.offload != "none"
    # On its way to the host a gradient is copied, and its norm is taken in 64 bits.
    alone = size + 8 if offloads else cast
    return Buffers(
        always=size * max(large, head, embedding) if offloads else 0.0,
        sending=waiting + max(cast * bucket["reduce"], alone * large),
        sending_head=waiting + alone * head,
        embedding=waiting + alone * embedding,
        step=_norm_in_double(job, layout, part),
    )


def _norm_in_double(job: Job, layout: Layout, part: Share) -> float:
    """DeepSpeed takes the norm of one parameter's gradient at a time, as far as it is this rank's, in 64 bits."""
    trained = part.base if job.trains_all else part.adapters
    ends = max(part.embedding, part.head) if job.trains_all else 0.0
    largest = min(max(_largest_matrix(job, part), ends), trained / layout.shard)
    return 8.0 * largest if layout.offload == "none" else 0.0


def _largest_matrix(job: Job, part: Share) -> float:
    """Elements of the largest trained parameter of a layer."""
    shape = job.shape
    if not job.trains_all:
        return job.lora_r * max(shape.hidden, shape.intermediate, shape.q)
    experts = shape.experts * shape.expert_intermediate * 2 if any(part.kinds) else 0
    return shape.hidden * max(shape.intermediate, shape.q, experts)


def _zero3(job: Job, layout: Layout, part: Share) -> Buffers:
    bucket = buckets(job, layout)
    size = 4 if job.precision == "32-true" else 2
    reduced = _REDUCED
    layer, _ = _layer(job, part)
    prefetch = bucket["prefetch"] * size
    total = layer * len(part.kinds) + part.ends * size
    # Around the turn from forward to backward, layers within half the reuse distance stay gathered.
    live = min(total, max(_REUSE / 2 * size, layer))
    end = max(part.head, part.embedding) * size
    # The update puts the gradients of one group of parameters together, where the optimizer is.
    group = min(bucket["group"], (part.base if job.trains_all else part.adapters) / layout.shard) * reduced
    # A gradient larger than the bucket is cast, and cut into the parts of all ranks, by itself.
    large = _largest_matrix(job, part)
    alone = 2 * reduced if job.trains_all else 0
    return Buffers(
        always=bucket["reduce"] * reduced,
        forward=layer + prefetch,
        loss=min(total, live + end),
        own=layer,
        ahead=min(total - layer, prefetch + live),
        ahead_of_first=prefetch,
        sending=alone * large if large > bucket["reduce"] else bucket["reduce"] * reduced,
        sending_head=alone * part.head,
        embedding=end + alone * part.embedding,
        step=bucket["reduce"] * reduced + (group if layout.offload == "none" else 0.0),
    )


def buckets(job: Job, layout: Layout) -> dict[str, float]:
    """Elements of ZeRO's buckets as ``configs/deepspeed`` writes them for this model, or as the layout overrides."""
    written = _written(_template(layout))
    square = job.shape.hidden**2
    automatic = {"reduce": max(square, _LEAST_BUCKET), "prefetch": max(int(0.9 * square), _LEAST_BUCKET)}
    reduce = _size(written.get("reduce_bucket_size"), automatic["reduce"])
    prefetch = _size(written.get("stage3_prefetch_bucket_size"), automatic["prefetch"])
    gather = _size(written.get("allgather_bucket_size"), _DEFAULT_ALLGATHER)
    return {
        "group": _size(written.get("sub_group_size"), _DEFAULT_GROUP),
        "reduce": layout.reduce_bucket or reduce,
        "overlap": 2 if written.get("overlap_comm", True) else 1,
        "prefetch": layout.prefetch_bucket or prefetch,
        "gather": gather,
    }


def _size(value: Any, automatic: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else automatic


def _template(layout: Layout) -> str:
    stage = layout.strategy.removeprefix("zero")
    if layout.offload == "nvme":
        return f"z{stage}_nvme"
    return f"z{stage}_offload" if layout.offload != "none" and stage != "1" else f"z{stage}"


@lru_cache
def _written(template: str) -> dict[str, Any]:
    path = shipped_folder("configs") / "deepspeed" / f"{template}.json"
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {})
    return found
