"""Buffers of communication: gathered weights, gradients on their way, buckets. By strategy, at each point of a step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_swift._shipped import shipped_folder
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.states import NF4, Share

__all__ = ["Buffers", "buckets", "buffers"]

# DeepSpeed's own default where the written configuration is silent.
_DEFAULT_ALLGATHER = 500_000_000
# stage3_max_reuse_distance of DeepSpeed, elements: weights needed again that soon stay gathered.
_REUSE = 1_000_000_000
_LEAST_BUCKET = 1 << 20


@dataclass(frozen=True)
class Buffers:
    """Bytes at each point.

    Args:
        forward: While a layer's forward runs.
        loss: From the last layer's output to its gradient.
        backward: While a layer's backward runs.
        reduced: More, when a layer's backward has ended and its gradients are sent.
        embedding: While the embedding's backward runs.
        step: While the optimizer runs.
    """

    forward: float = 0.0
    loss: float = 0.0
    backward: float = 0.0
    reduced: float = 0.0
    embedding: float = 0.0
    step: float = 0.0


def buffers(job: Job, layout: Layout, part: Share) -> Buffers:
    """What the strategy needs besides what the step needs on one GPU."""
    if layout.strategy == "ddp":
        # Gradients live in the buckets themselves (gradient_as_bucket_view).
        return Buffers()
    if layout.strategy in ("fsdp", "tp_pp"):
        return _fsdp(job, layout, part)
    if layout.strategy == "zero3":
        return _zero3(job, layout, part)
    return _zero12(job, layout)


def _fsdp(job: Job, layout: Layout, part: Share) -> Buffers:
    if layout.strategy == "tp_pp" and layout.shard == 1:
        return Buffers()
    layer, layer_gradients = _layer(job, part)
    ends = 2 if job.precision != "32-true" else 4
    head = (part.head or part.embedding) * ends if part.last else 0.0
    embedding = part.embedding * ends if part.first else 0.0
    reduced = layer_gradients * 4
    if layout.strategy == "tp_pp":
        # Weights stay gathered through all micro-batches (reshard_after_forward=False).
        whole = layer * len(part.kinds) + head + embedding
        return Buffers(whole, whole, whole, reduced, whole, 0.0)
    return Buffers(2 * layer, head + layer, 2 * layer, reduced, embedding, 0.0)


def _layer(job: Job, part: Share) -> tuple[float, float]:
    """Bytes of one gathered layer in the dtype of computation, and its trained elements."""
    count = max(1, len(part.kinds))
    size = 4 if job.precision == "32-true" else 2
    packed = NF4 if job.goal == "qlora" else size
    gathered = (part.quantisable * packed + part.blocks * size + part.adapters * size) / count
    trained = (part.quantisable + part.blocks) / count if job.trains_all else part.adapters / count
    return gathered, trained


def _zero12(job: Job, layout: Layout) -> Buffers:
    bucket = buckets(job, layout)
    reduce = bucket["reduce"] * (4 if job.precision != "bf16-true" else 2)
    return Buffers(backward=reduce, embedding=reduce, step=0.0)


def _zero3(job: Job, layout: Layout, part: Share) -> Buffers:
    bucket = buckets(job, layout)
    size = 4 if job.precision == "32-true" else 2
    layer, _ = _layer(job, part)
    prefetch = bucket["prefetch"] * size
    reduce = bucket["reduce"] * (4 if job.precision != "bf16-true" else 2)
    total = part.base if job.goal != "qlora" else part.quantisable * NF4 / size + part.blocks + part.ends
    # Around the turn from forward to backward, layers within half the reuse distance stay gathered.
    live = min(total * size, max(_REUSE / 2 * size, layer))
    end = max(part.head, part.embedding) * size
    return Buffers(layer + prefetch, live + end, max(layer + prefetch, live) + reduce, 0.0, end + reduce, 0.0)


def buckets(job: Job, layout: Layout) -> dict[str, float]:
    """Elements of ZeRO's buckets as ``configs/deepspeed`` writes them for this model, or as the layout overrides."""
    written = _written(_template(layout))
    square = job.shape.hidden**2
    automatic = {"reduce": max(square, _LEAST_BUCKET), "prefetch": max(int(0.9 * square), _LEAST_BUCKET)}
    reduce = _size(written.get("reduce_bucket_size"), automatic["reduce"])
    prefetch = _size(written.get("stage3_prefetch_bucket_size"), automatic["prefetch"])
    gather = _size(written.get("allgather_bucket_size"), _DEFAULT_ALLGATHER)
    overlap = 2 if written.get("overlap_comm", True) else 1
    return {
        "reduce": overlap * (layout.reduce_bucket or reduce),
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
