"""Tries every bundle that could work, ranks what fits by speed, and says why the others do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import get_args

from lightning_swift.planner._together import not_together
from lightning_swift.planner.activations import Checkpointing
from lightning_swift.planner.levers import Lever, levers
from lightning_swift.planner.memory import Memory, predict_memory
from lightning_swift.planner.settings import Job, Layout, Offload, StrategyName
from lightning_swift.planner.timing import Time, predict_time

__all__ = ["Candidate", "Limits", "Plan", "Rejected", "largest_batch", "longest_sequence", "search"]

# The middle of the prediction must leave this share of the card free.
_USABLE = 0.97
# What only fits if the upper end of the prediction does not come true ranks behind what fits either way.
_TIGHT = 0.6
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
# At equal speed the simpler one is better: each step down this list must pay for itself.
_COMPLEXITY: dict[StrategyName, float] = {"ddp": 0, "fsdp": 1, "zero1": 2.2, "zero2": 2, "zero3": 3, "tp_pp": 8}
_COST_OF_COMPLEXITY = 0.03
_LONGEST = 1 << 22
# Beyond this many ranks DDP's and FSDP's collectives over all ranks take long to start.
_MANY = 16


@dataclass(frozen=True)
class Limits:
    """What the user has fixed; None and ``"auto"`` leave it to the search.

    Args:
        strategy: The only strategy to consider.
        batch: Sequences per rank.
        checkpointing: What blocks keep.
        tensor: Tensor-parallel ranks.
        pipeline: Stages.
        ratio: Measured over predicted memory on this card.
    """

    strategy: StrategyName | None = None
    batch: int | None = None
    checkpointing: Checkpointing | None = None
    tensor: int | None = None
    pipeline: int | None = None
    ratio: float = 1.0


@dataclass(frozen=True)
class Candidate:
    """A layout that fits.

    Args:
        layout: It.
        memory: Predicted.
        time: Predicted.
        score: Tokens per second in the middle of the range, less what complexity costs.
    """

    layout: Layout
    memory: Memory
    time: Time
    score: float

    def levers(self, job: Job) -> list[Lever]:
        """What would save most memory next."""
        return levers(job, self.layout)


@dataclass(frozen=True)
class Rejected:
    """A layout that does not fit or does not work.

    Args:
        layout: The best of its kind.
        reason: In a sentence.
        memory: Predicted, if it was only that.
    """

    layout: Layout
    reason: str
    memory: Memory | None = None


@dataclass(frozen=True)
class Plan:
    """Outcome of a search.

    Args:
        job: The question.
        candidates: What fits, best first; one for each strategy, offload and checkpointing.
        rejected: What does not, nearest first.
    """

    job: Job
    candidates: list[Candidate] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    @property
    def best(self) -> Candidate | None:
        """The recommendation."""
        return self.candidates[0] if self.candidates else None


def search(job: Job, limits: Limits | None = None) -> Plan:
    """Rank everything.

    Args:
        job: What is trained on what.
        limits: What the user has fixed.
    """
    limits = limits or Limits()
    groups: dict[tuple[object, ...], list[Layout]] = {}
    rejected: list[Rejected] = []
    for layout in _layouts(job, limits):
        reason = _impossible(job, layout)
        if reason is not None:
            rejected.append(Rejected(layout, reason))
        else:
            groups.setdefault(_kind(layout), []).append(layout)
    candidates = []
    for layouts in groups.values():
        best, worst = _best_batch(job, layouts, limits)
        if best is not None:
            candidates.append(best)
        elif worst is not None:
            rejected.append(worst)
    candidates.sort(key=lambda candidate: -candidate.score)
    rejected.sort(key=lambda item: item.memory.peak if item.memory else float("inf"))
    return Plan(job, candidates, _one_reason_each(rejected))


def _one_reason_each(rejected: list[Rejected]) -> list[Rejected]:
    found: dict[tuple[object, ...], Rejected] = {}
    for item in rejected:
        found.setdefault((item.layout.strategy, item.layout.offload, item.layout.tensor, item.layout.pipeline), item)
    return list(found.values())


def _kind(layout: Layout) -> tuple[object, ...]:
    sizes = (layout.shard, layout.tensor, layout.pipeline, layout.sequence)
    return (layout.strategy, layout.offload, layout.checkpointing, *sizes)


def _best_batch(job: Job, layouts: list[Layout], limits: Limits) -> tuple[Candidate | None, Rejected | None]:
    """The fastest batch of one kind that fits, or the smallest with the reason why it does not."""
    best: Candidate | None = None
    for layout in layouts:
        memory = predict_memory(job, layout, ratio=limits.ratio)
        reason = _does_not_fit(job, layout, memory)
        if reason is not None:
            # Larger batches only need more.
            return best, None if best else Rejected(layout, reason, memory)
        time = predict_time(job, layout)
        score = sum(time.rate) / 2 * (1 - _COST_OF_COMPLEXITY * _COMPLEXITY[layout.strategy])
        score *= 1.0 if memory.high <= job.gpu.memory else _TIGHT
        if best is None or score > best.score * 1.01:
            best = Candidate(layout, memory, time, score)
    return best, None


def _does_not_fit(job: Job, layout: Layout, memory: Memory) -> str | None:
    limit = job.gpu.memory * _USABLE
    if memory.peak > limit:
        return f"needs {memory.peak / 1e9:.1f} GB of {job.gpu.memory / 1e9:.1f} GB, at {memory.where}"
    if memory.host > job.host_bytes:
        return f"needs {memory.host / 1e9:.0f} GB of host memory in each machine of {job.host_bytes / 1e9:.0f} GB"
    return None


def _impossible(job: Job, layout: Layout) -> str | None:
    shape = job.shape
    if not job.gpu.bfloat16 and job.precision != "32-true":
        return f"{job.gpu.name} has no BF16; only --dtype 32-true trains there"
    if layout.tensor > 1 and shape.kv_heads % layout.tensor:
        return f"{shape.kv_heads} key and value heads cannot be cut over {layout.tensor} ranks"
    if layout.tensor > job.gpus:
        return f"tensor parallelism over {layout.tensor} ranks would cross machines of {job.gpus} cards"
    if layout.pipeline > shape.layers:
        return f"{shape.layers} layers cannot make {layout.pipeline} stages"
    if job.world == 1 and layout.offload == "none" and layout.strategy != "ddp":
        return "one card has nobody to share states with"
    return not_together(job, layout)


def _layouts(job: Job, limits: Limits) -> Iterator[Layout]:
    cut = limits.tensor is not None or limits.pipeline is not None
    names = (limits.strategy,) if limits.strategy else ("tp_pp",) if cut else get_args(StrategyName)
    for name in names:
        for sizes in _sizes(job, name, limits):
            for offload in _offloads(job, name):
                yield from _with_checkpointing(job, replace(sizes, offload=offload), limits)


def _with_checkpointing(job: Job, layout: Layout, limits: Limits) -> Iterator[Layout]:
    modes = get_args(Checkpointing) if limits.checkpointing is None else (limits.checkpointing,)
    for mode in modes:
        for batch in _BATCHES if limits.batch is None else (limits.batch,):
            found = _accumulated(job, replace(layout, checkpointing=mode), batch)
            if found is not None:
                yield found


def _accumulated(job: Job, layout: Layout, batch: int) -> Layout | None:
    """The layout with as many micro-batches as the wanted global batch needs; None if it does not divide."""
    if job.global_batch is None:
        return replace(layout, batch=batch * layout.microbatches)
    turns, rest = divmod(job.global_batch, batch * layout.data)
    if rest or turns < 1:
        return None
    if layout.pipeline == 1:
        return replace(layout, batch=batch, accumulate=turns)
    # One schedule for all of them has the smallest bubble; 1F1B needs one micro-batch per stage.
    return None if turns < layout.pipeline else replace(layout, batch=batch * turns, microbatches=turns)


def _offloads(job: Job, name: StrategyName) -> tuple[Offload, ...]:
    if name in ("ddp", "tp_pp", "zero1"):
        return ("none",)
    if name == "fsdp":
        return ("none", "cpu")
    if name == "zero2":
        return ("none", "optimizer")
    # Adapters have too few states for a disk to be worth it.
    return ("none", "optimizer", "cpu", "nvme") if job.trains_all else ("none", "optimizer", "cpu")


def _sizes(job: Job, name: StrategyName, limits: Limits) -> Iterator[Layout]:
    world = job.world
    if name == "ddp":
        yield Layout("ddp", replicate=world)
    elif name == "fsdp":
        yield Layout("fsdp", shard=world)
        if job.nodes > 1 and job.gpus > 1:
            yield Layout("fsdp", shard=job.gpus, replicate=job.nodes)
    elif name == "tp_pp":
        yield from _meshes(job, limits)
    elif world > 1 or name != "zero1":
        yield Layout(name, shard=world)


def _meshes(job: Job, limits: Limits) -> Iterator[Layout]:
    """Tensor parallelism inside a machine, pipelines across, FSDP2 on what is left."""
    powers = [1 << power for power in range(11)]
    for tensor in powers if limits.tensor is None else [limits.tensor]:
        for pipeline in powers if limits.pipeline is None else [limits.pipeline]:
            cells = tensor * pipeline
            if cells < 2 or cells > job.world or job.world % cells or tensor > job.gpus or pipeline > job.shape.layers:
                continue
            data = job.world // cells
            parts = 4 * pipeline if pipeline > 1 else 1
            # States are shared inside a machine's worth of ranks at least; copies beyond 64 ranks.
            shard = min(data, 64)
            if data % shard:
                continue
            yield Layout(
                "tp_pp",
                shard=shard,
                replicate=data // shard,
                tensor=tensor,
                pipeline=pipeline,
                microbatches=parts,
                sequence=tensor > 1,
                loss_parallel=tensor > 1,
            )


def longest_sequence(job: Job, layout: Layout, *, ratio: float = 1.0) -> int:
    """Most tokens per sequence that fit, in steps of 256; 0 if not even those do."""
    low, high = 0, 256
    while high <= _LONGEST and _fits(replace(job, length=high), layout, ratio):
        low, high = high, high * 2
    while high - low > 256:
        middle = (low + high) // 2 // 256 * 256
        low, high = (middle, high) if _fits(replace(job, length=middle), layout, ratio) else (low, middle)
    return low


def largest_batch(job: Job, layout: Layout, *, ratio: float = 1.0) -> int:
    """Most sequences per rank and micro-batch that fit; 0 if not even one does."""
    low, high = 0, 1
    while high <= _LONGEST and _fits(job, _batched(layout, high), ratio):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(job, _batched(layout, middle), ratio) else (low, middle)
    return low


def _batched(layout: Layout, batch: int) -> Layout:
    return replace(layout, batch=batch * layout.microbatches)


def _fits(job: Job, layout: Layout, ratio: float) -> bool:
    return _does_not_fit(job, layout, predict_memory(job, layout, ratio=ratio)) is None
