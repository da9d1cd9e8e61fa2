"""The second engine: the real layer code under fake tensors, in a subprocess, extended in the number of layers.

Nothing is allocated: a step of an 8B model takes about two seconds on a CPU. Memory is linear in the number of equal
layers, so two and three of them tell the rest, also for architectures that the closed form does not know.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.planner.memory import in_flight
from lightning_swift.planner.settings import Job, Layout, arithmetic, shards

__all__ = ["Trace", "depths_of", "extend", "run_requests", "trace_layout", "trace_request"]

_DTYPES = {2: "bfloat16", 4: "float32"}
_LIMIT = 300.0
# Deeper models are extended from these. FSDP gathers and reduces across two layers' borders: there the second is the
# last but one as well, and what it does in that place belongs to no line.
_SHORT, _SHORT_SHARDED = (2, 3), (3, 4)


@dataclass(frozen=True)
class Trace:
    """What a trace found.

    Args:
        requested: Peak bytes that PyTorch asked its allocator for.
        where: Section of the step.
        sections: Peak of every section.
    """

    requested: float
    where: str
    sections: dict[str, float]


def trace_request(
    config: Mapping[str, Any], job: Job, layout: Layout, *, layers: int, stage: int = 0, fake: bool = True
) -> dict[str, Any]:
    """One request of the subprocess: plain values.

    Args:
        config: Content of the ``config.json`` of the model.
        job: What is trained.
        layout: How.
        layers: Layers to build.
        stage: Pipeline stage.
        fake: False runs the step for real, to check the fake one.

    Raises:
        ConfigurationError: A layout that the trace does not know.
    """
    _refuse(job, layout)
    math = arithmetic(job, layout)
    sharded = shards(job, layout)
    masters = sharded and job.precision == "bf16-mixed"
    kept_size = 4 if masters and job.trains_all else math.weight
    adapter = 4 if masters else (math.adapter.size if math.adapter else 2)
    pipeline = layout.pipeline > 1
    return {
        "config": dict(config),
        "layers": layers,
        "batch": max(1, layout.batch // layout.microbatches),
        "length": job.length,
        "weight_dtype": _DTYPES[kept_size],
        "adapter_dtype": _DTYPES[adapter],
        "lora_r": 0 if job.trains_all else job.lora_r,
        "dropout": job.dropout,
        "dora": job.dora,
        "quantised": job.goal == "qlora",
        "checkpointing": layout.checkpointing,
        "loss": job.loss,
        "chunk": job.chunk,
        "optimizer": job.optimizer,
        "optimizer_in_backward": job.optimizer_in_backward,
        "autocast": math.autocast,
        "resident": _is_resident(layout, stage),
        "precision": job.precision,
        "sharded": sharded,
        "shard": layout.shard,
        "replicate": layout.replicate,
        "tensor": layout.tensor,
        "sequence": layout.sequence,
        "loss_parallel": layout.loss_parallel,
        "scheduled": layout.strategy == "tp_pp",
        "reshard": "auto" if layout.strategy == "fsdp" else False,
        "stage": _stage_name(layout, stage),
        "flight": int(in_flight(layout, stage)) if pipeline else 1,
        "fake": fake,
    }


def _is_resident(layout: Layout, stage: int) -> bool:
    """Gradients of an earlier micro-batch are there when memory is highest."""
    if layout.strategy == "tp_pp":
        return layout.microbatches > in_flight(layout, stage)
    return layout.keeps_gradients or layout.accumulate > 1


def _stage_name(layout: Layout, stage: int) -> str:
    if layout.pipeline == 1:
        return "whole"
    return "first" if stage == 0 else "last" if stage == layout.pipeline - 1 else "middle"


def _refuse(job: Job, layout: Layout) -> None:
    """What only the closed form covers."""
    reasons = {
        "ZeRO (DeepSpeed's own buffers)": layout.strategy.startswith("zero"),
        "adapters under tensor parallelism": layout.tensor > 1 and not job.trains_all,
        "8-bit Adam": job.optimizer == "adamw_8bit",
        "offloading": layout.offload != "none",
        "an optimizer in the backward pass of sharded weights": job.optimizer_in_backward and layout.strategy != "ddp",
    }
    found = [name for name, present in reasons.items() if present]
    if found:
        raise ConfigurationError(
            f"the trace does not know {', '.join(found)}; the closed form does.", where="--trace", fix="Leave it out."
        )


def run_requests(requests: list[dict[str, Any]], *, limit: float = _LIMIT) -> list[dict[str, Any]]:
    """Run requests in one subprocess, so that an abort inside PyTorch ends only that.

    Raises:
        ModelError: The subprocess failed.
    """
    command = [sys.executable, "-m", "lightning_swift.planner._trace_main"]
    try:
        done = subprocess.run(  # noqa: S603
            command, input=json.dumps(requests), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"the trace took more than {limit:g} s.", where="trace") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ModelError(
            f"the trace of this architecture failed: {lines[-1]}", where="trace", fix="Use the closed form."
        )
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def trace_layout(config: Mapping[str, Any], job: Job, layout: Layout) -> Trace:
    """Trace a step of the layout, extended to all layers of the model (or of the first pipeline stage).

    Raises:
        ConfigurationError: A layout that the trace does not know.
        ModelError: The trace failed.
    """
    layers, short = job.shape.layers // layout.pipeline, depths_of(layout)
    depths = [layers] if layers <= max(short) else list(short)
    results = run_requests([trace_request(config, job, layout, layers=depth) for depth in depths])
    sections = extend([result["sections"] for result in results], depths, layers)
    where = max(sections, key=lambda name: sections[name])
    return Trace(sections[where], where, sections)


def depths_of(layout: Layout) -> tuple[int, int]:
    """Numbers of layers that tell the rest."""
    return _SHORT_SHARDED if layout.strategy in ("fsdp", "tp_pp") else _SHORT


def extend(sections: list[dict[str, int]], depths: list[int], layers: int) -> dict[str, float]:
    """Peaks of each section at ``layers`` layers: on the line through those at the depths that were traced."""
    if len(sections) == 1:
        return {name: float(value) for name, value in sections[0].items()}
    (few, more), (low, high) = sections, depths
    # Between the ends nothing is higher than at both of them, and what is there depends on the depth.
    names = (few.keys() & more.keys()) - {"between", "before"}
    slope = {name: (more[name] - few[name]) / (high - low) for name in names}
    return {name: more[name] + slope[name] * (layers - high) for name in names}
