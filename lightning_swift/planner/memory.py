"""Peak memory of one GPU and its host: the closed form, by component and by point of the step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from typing_extensions import override

from lightning_swift.planner.activations import Layer, Step, profile
from lightning_swift.planner.buffers import Buffers, buffers
from lightning_swift.planner.settings import Job, Layout, arithmetic
from lightning_swift.planner.states import Share, States, share, states

__all__ = ["COMPONENTS", "Memory", "Point", "in_flight", "predict_memory", "requested_peak"]

COMPONENTS = (
    *("weights", "quantised weights", "adapters", "gradients", "optimizer", "activations"),
    *("logits and loss", "communication buffers", "allocator overhead", "CUDA context"),
)
# Published GPU peaks lie 4 to 12 % above what PyTorch asks its allocator for; the middle of that is what is shown.
_OVERHEAD = (0.0, 0.05, 0.12)
# CUDA context, cuBLAS workspaces and NCCL, measured by others between 0.4 and 1.2 GB.
_CONTEXT = (0.4e9, 0.6e9, 1.2e9)


@dataclass(frozen=True)
class Point:
    """What is alive at one point of the step besides what always is. Bytes.

    Args:
        where: In words.
        gradients: Of parameters.
        activations: Kept for the backward pass and in work.
        logits: Logits and loss.
        communication: Buffers.
        optimizer: Temporaries of the update.
    """

    where: str
    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    communication: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.gradients + self.activations + self.logits + self.communication + self.optimizer


@dataclass(frozen=True)
class Memory:
    """Predicted memory of the fullest GPU, in bytes.

    Args:
        peak: What the card will probably show.
        low: Without fragmentation and with the smallest context.
        high: With what has been seen at worst.
        requested: What PyTorch asks its allocator for, which a simulation can count.
        components: Parts of ``peak``, by the names of ``COMPONENTS``.
        where: Point of the step at which the peak is.
        points: Requested bytes at every point.
        host: Host memory of one machine.
        disk: NVMe of one machine.
        stage: Pipeline stage of that GPU.
    """

    peak: float
    low: float
    high: float
    requested: float
    components: dict[str, float]
    where: str
    points: dict[str, float] = field(default_factory=dict)
    host: float = 0.0
    disk: float = 0.0
    stage: int = 0


def predict_memory(job: Job, layout: Layout, *, ratio: float = 1.0) -> Memory:
    """Predicted peak of the fullest GPU.

    Args:
        job: What is trained on what.
        layout: How.
        ratio: Measured over predicted on this kind of card, from earlier runs.
    """
    stages = range(layout.pipeline) if layout.pipeline > 1 else range(1)
    # Only the first stages (most micro-batches in flight) and the last (logits) can be the fullest.
    candidates = sorted({stages[0], stages[len(stages) // 2], stages[-1]})
    return max((_stage_memory(job, layout, stage, ratio) for stage in candidates), key=lambda memory: memory.peak)


def requested_peak(job: Job, layout: Layout, stage: int = 0) -> float:
    """Bytes that PyTorch asks its allocator for at the peak, which the trace counts too."""
    part = share(job, layout, stage)
    kept = states(job, layout, part)
    return kept.always + max(point.total for point in _points(job, layout, part, kept, stage))


def _stage_memory(job: Job, layout: Layout, stage: int, ratio: float) -> Memory:
    part = share(job, layout, stage)
    kept = states(job, layout, part)
    points = _points(job, layout, part, kept, stage)
    top = max(points, key=lambda point: point.total)
    requested = (kept.always + top.total) * ratio
    low, middle, high = (requested * (1 + more) + base for more, base in zip(_OVERHEAD, _CONTEXT, strict=True))
    components = {
        "weights": kept.weights,
        "quantised weights": kept.quantised,
        "adapters": kept.adapters,
        "gradients": top.gradients,
        "optimizer": kept.optimizer + top.optimizer,
        "activations": top.activations,
        "logits and loss": top.logits,
        "communication buffers": top.communication,
        "allocator overhead": middle - _CONTEXT[1] - (kept.always + top.total),
        "CUDA context": _CONTEXT[1],
    }
    where = top.where if layout.pipeline == 1 else f"{top.where}, on stage {stage + 1} of {layout.pipeline}"
    by_point: dict[str, float] = {}
    for point in points:
        by_point[point.where] = max(by_point.get(point.where, 0.0), kept.always + point.total)
    return Memory(
        peak=middle,
        low=low,
        high=high,
        requested=requested,
        components=components,
        where=where,
        points=by_point,
        host=(kept.host + _process(job, part, layout)) * job.gpus,
        disk=kept.disk * job.gpus,
        stage=stage,
    )


def _process(job: Job, part: Share, layout: Layout) -> float:
    """Host memory of a training process: Python, CUDA and loaders, and weights on their way to the card."""
    # Weights are read tensor by tensor; ZeRO-3 with quantised layers has a whole quantised copy first.
    loading = part.quantisable * 0.52 if layout.strategy == "zero3" and job.goal == "qlora" else 0.0
    return 4e9 + loading


def _points(job: Job, layout: Layout, part: Share, kept: States, stage: int) -> list[Point]:
    step = profile(job.shape, layout.micro_options(job))
    sent = buffers(job, layout, part)
    flight = in_flight(layout, stage)
    saved = _saved(step, part)
    if not part.last:
        step = replace(step, loss=0.0, loss_logits=0.0, loss_forward=0.0, kept=0.0, head_gradients=0.0)
    held = (flight - 1) * saved
    scheduled = layout.strategy == "tp_pp"
    policy = (
        _Scheduled(job, layout, part, kept, step, stage) if scheduled else _Gradients(job, layout, part, kept, step)
    )
    found = _forward_and_loss(step, part, sent, policy, held, saved)
    found += _backward(step, part, sent, policy, held)
    if part.first:
        found.append(_embedding(step, part, sent, policy, held))
    if sent.reduction:
        gradients = policy.complete if scheduled else policy.at(policy.whole)
        found.append(Point("the reduction of gradients", gradients, communication=sent.always + sent.reduction))
    found.append(Point("the optimizer step", kept.gradients, optimizer=kept.temporary, communication=sent.step))
    return found


def _saved(step: Step, part: Share) -> float:
    return step.entered + sum(layer.saved for layer in _layers(step, part))


def _layers(step: Step, part: Share) -> list[Layer]:
    layers = [step.layers[kind] for kind in part.kinds]
    return [step.first, *layers[1:]] if part.first else layers


def in_flight(layout: Layout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at most, in units of its own layers."""
    stages, parts, schedule = layout.pipeline, layout.microbatches, layout.schedule
    if stages == 1:
        return 1.0
    if schedule == "GPipe":
        return float(parts)
    if schedule == "1F1B":
        return float(min(parts, stages - stage))
    if schedule.startswith("Interleaved"):
        # Narayanan et al. 2021: 2 (p - r - 1) + (v - 1) p + 1 chunks of 1/v of the layers each.
        v = max(2, layout.virtual)
        return min(parts * v, 2 * (stages - stage - 1) + (v - 1) * stages + 1) / v
    # Along a V each rank holds 2p half-stages at most (Qi et al. 2024).
    return min(parts, stages)


class _Gradients:
    """How many bytes of gradients are alive when the backward pass has come to some layer."""

    def __init__(self, job: Job, layout: Layout, part: Share, kept: States, step: Step) -> None:
        # What the embedding's gradient is cast to for the reduction.
        self.cast = 0.0
        self.frees = job.optimizer_in_backward or layout.strategy in ("fsdp", "zero2", "zero3")
        self.resident = layout.keeps_gradients
        self.complete = kept.gradients
        self.head = step.head_gradients
        self.tied_whole = job.shape.tied and layout.strategy == "fsdp"
        self.whole = sum(layer.gradients for layer in _layers(step, part)) + step.head_gradients
        self.whole += step.embedding_gradient if part.first else 0.0
        # Where gradients are sent away layer by layer, only this rank's share stays.
        self._share = kept.gradients / self.whole if self.whole and self.frees else 1.0
        self._accumulated = layout.accumulate > 1 and self.frees and not job.optimizer_in_backward
        self._earlier, self._from_first = 0.0, False
        if layout.strategy == "zero1":
            # FP32 gradients are there all the time, and those of the pass wait until it is over.
            self._share, self._earlier = 1.0, kept.gradients
        elif layout.strategy in ("zero2", "zero3"):
            # This rank's part is one buffer: there always, or (stage 2, one micro-batch) from the first reduction on.
            self._from_first = layout.strategy == "zero2" and layout.accumulate == 1
            self._accumulated = True

    def at(self, done: float) -> float:
        """Bytes when gradients of ``done`` bytes have been made before."""
        if self.resident or (self._accumulated and (done or not self._from_first)):
            return self.complete
        if self._from_first:
            return 0.0
        if self.tied_whole:
            # One group with the embedding, whose gradients are sent at the very end.
            return self.head + max(done - self.head, 0.0) * self._share
        return done * self._share + self._earlier


class _Scheduled(_Gradients):
    """Those of a schedule: added up whole, in the dtype in which they are reduced after its last micro-batch."""

    def __init__(self, job: Job, layout: Layout, part: Share, kept: States, step: Step, stage: int) -> None:
        super().__init__(job, layout, part, kept, step)
        if job.shape.tied and part.first and not part.last:
            # The head of another stage has the other half of its gradient.
            self.whole += job.shape.embedding * arithmetic(job, layout).weight
        # FP32, also under bf16-true.
        self._share = 1.0 if job.precision == "32-true" else 2.0
        self._accumulated = layout.microbatches > in_flight(layout, stage)
        self._earlier = kept.gradients if layout.accumulate > 1 else 0.0
        self.complete = self.whole * self._share + self._earlier
        # A weight that head and embedding share is one group with what is outermost, whose gradients are cast last.
        self._waiting = self.head if job.shape.tied and part.first else 0.0
        if self._share > 1 and not self._accumulated and not job.shape.tied:
            self.cast = step.embedding_gradient * self._share

    @override
    def at(self, done: float) -> float:
        if self._accumulated:
            return self.complete
        waiting = min(self._waiting, done)
        return (done - waiting) * self._share + waiting + self._earlier


def _forward_and_loss(
    step: Step, part: Share, sent: Buffers, policy: _Gradients, held: float, saved: float
) -> list[Point]:
    last = _layers(step, part)[-1]
    before = policy.at(0.0) if policy.resident else policy.at(0.0) - (policy.head if policy.tied_whole else 0.0)
    forward = held + saved - last.saved + last.forward
    found = [Point("the last layer's forward pass", before, forward, communication=sent.always + sent.forward)]
    if sent.gathering:
        level = held + saved - last.saved
        found.append(replace(found[0], activations=level, communication=sent.always + sent.gathering))
    if part.last:
        fresh = 0.0 if policy.resident else step.head_gradients
        activations = held + saved + step.loss - step.loss_logits - step.head_gradients
        gathered = sent.always + sent.loss
        longer = gathered + sent.held_longer
        found.append(Point("the loss", before + fresh, activations, step.loss_logits, longer))
        cast = sum(step.cast[kind] for kind in part.kinds)
        forward = held + saved + step.loss_forward + cast
        found.append(Point("the loss", before, forward, 0.0, gathered + sent.held))
        if sent.sending_head:
            gathered = sent.always + sent.ahead + sent.sending_head
            found.append(Point("the loss", before + fresh, held + saved, step.kept, gathered))
    return found


def _backward(step: Step, part: Share, sent: Buffers, policy: _Gradients, held: float) -> list[Point]:
    layers = _layers(step, part)
    level = held + step.entered
    done = step.head_gradients + sum(layer.gradients for layer in layers)
    points = []
    for index, layer in enumerate(layers):
        after = level
        level += layer.saved
        done -= layer.gradients
        where = f"the backward pass of layer {index + 1} of {len(layers)}"
        fresh = policy.at(done) + layer.gradients + step.waiting
        ahead = sent.always + (sent.ahead if index else sent.ahead_of_first)
        before = sent.sending_head if index == len(layers) - 1 else sent.sending
        activations = level + layer.backward - layer.gradients
        points.append(Point(where, fresh, activations, step.kept, ahead + sent.own + before))
        points.append(Point(where, fresh, after, step.kept, ahead + sent.sending))
    return points


def _embedding(step: Step, part: Share, sent: Buffers, policy: _Gradients, held: float) -> Point:
    layers = sum(layer.gradients for layer in _layers(step, part))
    gradients = policy.at(step.head_gradients + layers) + step.embedding + policy.cast
    if policy.resident:
        gradients = policy.complete + step.embedding
    return Point("the embedding's gradient", gradients, held, step.kept, sent.always + sent.embedding)
