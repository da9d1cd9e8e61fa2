"""The recommendation: the goal too if the user leaves it open, and the nearest plan that fits when nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.search import Candidate, Limits, Plan, search
from lightning_swift.planner.settings import Goal, Job

__all__ = ["nearest_that_fits", "plan_for", "refusal", "why"]

# Share of the card that the upper end of the prediction may take, where another goal would need less.
_ROOM = 0.95
# Room is worth this share of the speed, and no more: beyond it the next goal is better.
_WORTH = 0.7
_GOALS: tuple[Goal, ...] = ("full", "lora", "qlora")


def plan_for(job: Job, limits: Limits | None = None, *, any_goal: bool = False) -> Plan:
    """Search; with ``any_goal`` the most thorough training that fits with room: all weights, LoRA, QLoRA.

    What only fits by keeping weights or states elsewhere than on the card and in the optimizer of the host, or only
    without room for error, yields to the next goal.
    """
    if not any_goal:
        return search(job, limits)
    plans = [search(replace(job, goal=goal), limits) for goal in _GOALS]
    comfortable = [plan for plan in map(_with_room, plans) if plan is not None]
    fitting = [plan for plan in plans if plan.best is not None]
    return (comfortable or fitting or plans[-1:])[0]


def _with_room(plan: Plan) -> Plan | None:
    """The plan with what fits with room first; None if nothing does, or only what is far slower than the best."""
    least = _WORTH * plan.candidates[0].score if plan.candidates else 0.0
    roomy = [c for c in plan.candidates if _is_comfortable(plan.job, c) and c.score >= least]
    if not roomy:
        return None
    return replace(plan, candidates=[*roomy, *(c for c in plan.candidates if c not in roomy)])


def _is_comfortable(job: Job, candidate: Candidate) -> bool:
    return candidate.memory.high <= _ROOM * job.gpu.memory and candidate.layout.offload in ("none", "optimizer")


def why(plan: Plan) -> str:
    """One sentence for the recommendation."""
    job, best = plan.job, plan.best
    if best is None:
        return "nothing fits"
    layout = best.layout
    simpler = [item for item in plan.rejected if item.memory is not None and item.layout.strategy != layout.strategy]
    memory = f"{best.memory.peak / 1e9:.1f} of {job.gpu.memory / 1e9:.1f} GB per GPU, peak at {best.memory.where}"
    reason = f"; {simpler[0].layout.strategy} {simpler[0].reason}" if simpler else "; the fastest that fits"
    task = f"{job.goal} training of {job.shape.name} on {job.world} x {job.gpu.name}"
    return f"{layout.strategy} for {task}: {memory}{reason}."


def refusal(plan: Plan, limits: Limits | None = None) -> ConfigurationError:
    """The error when nothing fits: it names what comes nearest and what would fit."""
    job = plan.job
    what = f"{job.shape.name} ({job.goal}) does not fit {job.world} x {job.gpu.name} at {job.length} tokens"
    if not plan.rejected:
        return _nothing_to_try(job, limits or Limits())
    nearest = plan.rejected[0]
    return ConfigurationError(
        f"{what}: the nearest, {nearest.layout.strategy}: {nearest.reason}.",
        where="plan",
        fix=nearest_that_fits(job, limits),
    )


def _nothing_to_try(job: Job, limits: Limits) -> ConfigurationError:
    if limits.tensor is not None or limits.pipeline is not None:
        sizes = f"tensor parallelism {limits.tensor or 'of any size'}, pipeline {limits.pipeline or 'of any size'}"
        return ConfigurationError(
            f"no mesh with {sizes} can be made of {job.nodes} x {job.gpus} GPUs and {job.shape.layers} layers"
            + ("." if job.global_batch is None else f" for batches of {job.global_batch} sequences."),
            where="--tensor-parallel, --pipeline-parallel",
            fix="Their product must divide the number of GPUs; tensor parallelism must fit one machine.",
        )
    return ConfigurationError(
        f"no batch of {job.global_batch} sequences can be cut over {job.world} ranks.",
        where="--global-batch",
        fix="Give a multiple of the number of GPUs.",
    )


def nearest_that_fits(job: Job, limits: Limits | None = None) -> str:
    """The smallest change that makes it fit, in words."""
    for changes, words in _cures(job):
        if search(replace(job, **changes), limits).best is not None:
            return f"The nearest plan that fits: {words}."
    return "Use more or larger cards, or a smaller model."


def _cures(job: Job) -> Iterator[tuple[dict[str, Any], str]]:
    if job.loss != "chunked":
        yield {"loss": "chunked"}, "--loss chunked"
    if job.trains_all:
        yield {"goal": "lora"}, "--goal lora"
    if job.goal != "qlora":
        yield {"goal": "qlora"}, "--goal qlora"
    length = job.length // 2
    while length >= 256:
        yield {"length": length}, f"--seq-length {length}"
        length //= 2
    for factor in (2, 4, 8, 16, 32):
        yield {"nodes": job.nodes * factor}, f"{job.world * factor} of these cards (--nodes {job.nodes * factor})"
