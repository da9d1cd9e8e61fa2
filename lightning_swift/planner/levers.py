"""What would save memory next, and how much: each lever is tried by the same closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_swift.planner._together import not_together
from lightning_swift.planner.memory import predict_memory
from lightning_swift.planner.settings import Job, Layout

__all__ = ["Lever", "levers"]

# A lever that saves less is not worth a line.
_LEAST = 0.05e9


@dataclass(frozen=True)
class Lever:
    """One change.

    Args:
        name: In words, with what to set.
        saves: Bytes of the peak.
        where: Where the peak is then.
    """

    name: str
    saves: float
    where: str


def levers(job: Job, layout: Layout) -> list[Lever]:
    """All changes that lower the peak, the most effective first."""
    now = predict_memory(job, layout)
    found = []
    for name, other_job, other_layout in _changes(job, layout):
        if not_together(other_job, other_layout) is not None:
            continue
        then = predict_memory(other_job, other_layout)
        if now.peak - then.peak > _LEAST:
            found.append(Lever(name, now.peak - then.peak, then.where))
    return sorted(found, key=lambda lever: -lever.saves)


def _changes(job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    if job.loss != "chunked":
        yield "compute the loss in chunks (--loss chunked)", replace(job, loss="chunked"), layout
    if layout.checkpointing == "none":
        yield "selective activation checkpointing", job, replace(layout, checkpointing="selective")
    if layout.checkpointing != "full":
        yield "full activation checkpointing", job, replace(layout, checkpointing="full")
    if layout.batch > layout.microbatches:
        yield "half the micro-batch", job, replace(layout, batch=max(layout.microbatches, layout.batch // 2))
    if job.optimizer == "adamw":
        yield "fused AdamW (--optimizer adamw_fused)", replace(job, optimizer="adamw_fused"), layout
    if job.optimizer in ("adamw", "adamw_fused") and job.trains_all:
        yield "8-bit AdamW (--optimizer adamw_8bit)", replace(job, optimizer="adamw_8bit"), layout
    yield from _sharding(job, layout)
    if job.goal == "full":
        yield "LoRA (--goal lora)", replace(job, goal="lora"), layout
    if job.goal in ("full", "lora"):
        yield "QLoRA (--goal qlora)", replace(job, goal="qlora"), layout


def _sharding(job: Job, layout: Layout) -> Iterator[tuple[str, Job, Layout]]:
    if layout.strategy == "ddp" and job.world > 1:
        yield "shard over all ranks (FSDP)", job, replace(layout, strategy="fsdp", shard=job.world, replicate=1)
    if layout.strategy == "fsdp" and layout.replicate > 1:
        yield "shard over all machines", job, replace(layout, shard=job.world, replicate=1)
    if layout.strategy in ("fsdp", "zero3") and layout.offload == "none":
        yield "offload weights and optimizer to the host", job, replace(layout, offload="cpu")
    if layout.strategy in ("zero2", "zero3") and layout.offload == "none":
        yield "offload the optimizer to the host", job, replace(layout, offload="optimizer")
