"""Time of a step: compute, memory, communication, pipeline bubble, offload. Ranges, since no machine was measured."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.states import NF4, share

__all__ = ["Budget", "Time", "budget", "predict_time"]

# Share of the card's peak that training reaches. Published runs of dense models lie between 0.35 and 0.55; QLoRA on
# short sequences was measured (LLaMA-Factory wiki, A100) at 0.30 at 1024 tokens and 0.46 at 8192.
_EFFICIENCY = (0.35, 0.55)
_QLORA_EFFICIENCY = (0.28, 0.46)
# Below this many rows per matrix product a card is not filled.
_FULL_ROWS = 2048
# Collectives reach this share of a link's rate.
_LINK = 0.75
# Copies between host and card reach this share of the bus.
_BUS = 0.8
# Adam on the host, parameters per second and machine: about a billion with DeepSpeed's own, which its authors measured
# to be five to seven times as fast as torch's (Ren et al. 2021, "ZeRO-Offload", table 4).
_HOST_ADAM = {"zero": 1e9, "torch": 0.2e9}
# NVMe, bytes per second, for each machine.
_NVME = 3e9
# Gathers and reductions overlap with compute, but not perfectly: exposed is what exceeds this share of it, and a tenth.
_OVERLAP = 0.7
_NEVER_HIDDEN = 0.1


@dataclass(frozen=True)
class Time:
    """Predicted time of one optimizer step, in seconds, and what it is made of.

    Args:
        low: Fastest (high efficiency).
        high: Slowest.
        tokens: Tokens per step of all ranks.
        compute: Matrix products at the middle efficiency.
        communication: All collectives, hidden or not.
        exposed: What of them is not hidden behind compute.
        offload: Traffic to the host, and the optimizer there.
        bubble: Share of the step that a pipeline waits.
        sent: Bytes that one card sends per step.
    """

    low: float
    high: float
    tokens: int
    compute: float
    communication: float
    exposed: float
    offload: float
    bubble: float
    sent: float

    @property
    def step(self) -> float:
        """Middle of the range."""
        return (self.low + self.high) / 2

    @property
    def rate(self) -> tuple[float, float]:
        """Tokens per second of all ranks, slowest and fastest."""
        return self.tokens / self.high, self.tokens / self.low


@dataclass(frozen=True)
class Budget:
    """What a number of tokens takes.

    Args:
        hours: Wall-clock hours, fewest and most.
        cost: Price of all cards for that long, or None.
        tokens_per_day: Slowest and fastest.
    """

    hours: tuple[float, float]
    cost: tuple[float, float] | None
    tokens_per_day: tuple[float, float]


def budget(job: Job, time: Time, tokens: float, price: float | None) -> Budget:
    """Hours and cost of ``tokens`` tokens.

    Args:
        job: Number of cards.
        time: Of a step.
        tokens: To train on.
        price: Of one card for an hour, in any currency.
    """
    slow, fast = time.rate
    hours = (tokens / fast / 3600, tokens / slow / 3600)
    cost = None if price is None else (hours[0] * job.world * price, hours[1] * job.world * price)
    return Budget(hours, cost, (slow * 86400, fast * 86400))


def predict_time(job: Job, layout: Layout) -> Time:
    """Predicted time of an optimizer step (all its micro-batches)."""
    tokens = layout.batch * layout.accumulate * layout.data * job.length
    flops = _flops_per_token(job, layout) * tokens / job.world
    traffic = _memory_traffic(job, layout) * layout.accumulate
    inside, across, hidden_fraction = _communication(job, layout)
    seconds = _seconds(job, inside, across)
    offload = _offload(job, layout)
    bubble, slowest = _bubble(layout), _imbalance(job, layout)
    ends = []
    for efficiency in _efficiency(job, layout):
        compute = max(flops / (job.gpu.tflops * 1e12 * efficiency), traffic / (job.gpu.bandwidth * 1e9 * 0.8))
        exposed = _exposed(seconds, compute, hidden_fraction)
        ends.append((compute * slowest / (1 - bubble) + exposed + offload, compute, exposed))
    (high, slow_compute, _), (low, fast_compute, _) = ends
    return Time(
        low=low,
        high=high,
        tokens=tokens,
        compute=(slow_compute + fast_compute) / 2,
        communication=seconds,
        exposed=(ends[0][2] + ends[1][2]) / 2,
        offload=offload,
        bubble=bubble,
        sent=inside + across,
    )


def _exposed(seconds: float, compute: float, hidden: float) -> float:
    """What of the communication is not hidden, if a share of it could be."""
    could = seconds * hidden
    return seconds - could + max(could - _OVERLAP * compute, _NEVER_HIDDEN * could)


def _efficiency(job: Job, layout: Layout) -> tuple[float, float]:
    low, high = _QLORA_EFFICIENCY if job.goal == "qlora" else _EFFICIENCY
    rows = max(1, layout.batch // layout.microbatches) * job.length
    # A card with four times the FLOPs per byte of a small one needs longer products to be filled.
    filled = min(1.0, 0.5 + 0.5 * rows / _FULL_ROWS)
    # Cut matrices are smaller, and so are their products.
    cut = 1.0 if layout.tensor == 1 else 0.92 if layout.tensor <= 4 else 0.85
    return low * filled * cut, high * filled * cut


def _flops_per_token(job: Job, layout: Layout) -> float:
    """Forward ``2 x`` matrices, and ``2 L q S`` of causal attention; as many times as the passes need them."""
    shape = job.shape
    forward = 2 * shape.active_parameters + 2 * shape.layers * shape.q * job.length
    backward = 2.0 if job.trains_all else 1.0
    again = {"none": 0.0, "selective": 0.05, "full": 1.0}[layout.checkpointing]
    return forward * (1 + backward + again)


def _memory_traffic(job: Job, layout: Layout) -> float:
    """Weights read from device memory in each pass, and written once more where they are expanded from four bits."""
    part = share(job, layout, 0)
    passes = 3 if layout.checkpointing == "full" else 2
    size = 2 + NF4 + 2 if job.goal == "qlora" else 2
    return part.base * size * passes


def _communication(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Bytes that one card sends per step inside its machine and across, and the share that can be hidden."""
    sharded, copied, waiting = _data_parallel(job, layout)
    inside, across = _tensor(job, layout), 0.0
    # Of the axes of the mesh, tensor-parallel ranks lie closest together, then those that share a copy, then copies.
    for sent, ranks in ((sharded + waiting, layout.tensor * layout.shard), (copied, layout.tensor * layout.data)):
        leaves = job.nodes > 1 and ranks > job.gpus
        inside, across = (inside, across + sent) if leaves else (inside + sent, across)
    pipeline = _pipeline(job, layout)
    across, inside = (across + pipeline, inside) if job.nodes > 1 else (across, inside + pipeline)
    whole = inside + across
    # A pipeline reduces gradients when its last micro-batch is through: nothing is left to hide that behind.
    hidden = 0.0 if layout.pipeline > 1 or not whole else (sharded + copied) / whole
    return inside, across, hidden


def _data_parallel(job: Job, layout: Layout) -> tuple[float, float, float]:
    """Bytes per step among the ranks that share a copy, among copies, and those that the next step waits for."""
    part = share(job, layout, 0)
    trained = part.base if job.trains_all else part.adapters
    size = 4 if job.precision == "32-true" else 2
    weights = part.base * size if job.goal != "qlora" else part.quantisable * NF4 + (part.base - part.quantisable) * 2
    ring = (layout.data - 1) / layout.data
    if layout.strategy == "ddp":
        return 0.0, 2 * trained * (2 if job.precision == "bf16-true" else 4) * ring, 0.0
    # The others sum in FP32 under every precision.
    reduced = 4
    if layout.strategy in ("zero1", "zero2"):
        # Stage 2 reduces after every micro-batch; both gather the new weights once, after the update.
        turns = layout.accumulate if layout.strategy == "zero2" else 1
        return trained * reduced * ring * turns, 0.0, trained * size * ring
    return *_sharded(layout, weights, trained * reduced), 0.0


def _sharded(layout: Layout, weights: float, gradients: float) -> tuple[float, float]:
    """Gathered twice and reduced once per micro-batch; a pipeline gathers once for all of them. Then copies agree."""
    ring = (layout.shard - 1) / layout.shard
    turns = 1 if layout.strategy == "tp_pp" else layout.accumulate
    gathers = 1 if layout.strategy == "tp_pp" else 2
    copies = 2 * gradients / layout.shard * (layout.replicate - 1) / layout.replicate
    return (gathers * weights + gradients) * ring * turns, copies * turns


def _tensor(job: Job, layout: Layout) -> float:
    """Four all-reduces of an activation per layer (six with recomputation); sequence parallelism sends as much."""
    if layout.tensor == 1:
        return 0.0
    rows = layout.batch * layout.accumulate * job.length
    passes = 6 if layout.checkpointing == "full" else 4
    ring = 2 * (layout.tensor - 1) / layout.tensor
    return passes * rows * job.shape.hidden * 2 * ring * job.shape.layers / layout.pipeline


def _pipeline(job: Job, layout: Layout) -> float:
    if layout.pipeline == 1:
        return 0.0
    rows = layout.batch * layout.accumulate * job.length / (layout.tensor if layout.sequence else 1)
    return 2 * rows * job.shape.hidden * 2


def _seconds(job: Job, inside: float, across: float) -> float:
    return inside / (job.gpu.link * 1e9 * _LINK) + across / (min(job.network_bytes, job.gpu.link * 1e9) * _LINK)


def _bubble(layout: Layout) -> float:
    """As ``parallel/schedule.py`` counts it."""
    if layout.pipeline == 1:
        return 0.0
    wait = layout.pipeline - 1
    work = layout.microbatches * layout.virtual
    if layout.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        return wait / (3 * work + wait)
    return wait / (work + wait)


def _imbalance(job: Job, layout: Layout) -> float:
    """How much longer the last stage takes than the mean one: it has the head, which counts as a part of a layer."""
    if layout.pipeline == 1:
        return 1.0
    shape = job.shape
    layer = max(1.0, (shape.active_parameters - shape.embedding) / shape.layers)
    mean = (shape.layers + shape.embedding / layer) / layout.pipeline
    # Whole layers only can be moved to even it out.
    most = max(-(-shape.layers // layout.pipeline), shape.layers // layout.pipeline + shape.embedding / layer)
    return max(1.0, most / mean)


def _offload(job: Job, layout: Layout) -> float:
    """Gradients to the host and weights back, weights for every pass if they live there, the update, the disk."""
    if layout.offload == "none":
        return 0.0
    part = share(job, layout, 0)
    bus = job.gpu.pcie * 1e9 * _BUS
    trained = (part.base if job.trains_all else part.adapters) / layout.shard
    rate = _HOST_ADAM["zero" if layout.strategy.startswith("zero") else "torch"]
    seconds = trained * (4 + 2) / bus + trained * job.gpus / rate
    if layout.offload == "cpu":
        weights = part.base * 2 if job.goal != "qlora" else part.quantisable * NF4 + (part.base - part.quantisable) * 2
        seconds += 2 * weights / layout.shard / bus * layout.accumulate
    if layout.offload == "nvme":
        seconds += 2 * 12 * trained * job.gpus / _NVME
    return seconds
