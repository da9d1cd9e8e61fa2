"""Prints a plan: a table, a stacked bar of memory for each candidate against the card's limit, or JSON."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_swift.planner.calibration import Calibration
from lightning_swift.planner.memory import Memory
from lightning_swift.planner.recipe import class_name, recipe_text, strategy_arguments
from lightning_swift.planner.search import Candidate, Plan, Rejected, largest_batch, longest_sequence
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.timing import budget

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COLOURS", "as_json", "assumptions", "component_table", "describe", "print_plan"]

COLOURS = {
    "weights": "blue",
    "quantised weights": "cyan",
    "adapters": "bright_cyan",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "logits and loss": "red",
    "communication buffers": "bright_magenta",
    "allocator overhead": "bright_black",
    "CUDA context": "white",
}
_WIDTH = 46
_SHOWN = 6
# In JSON: more than anybody compares.
_LISTED = 12


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    sizes = {"shard": layout.shard, "replicate": layout.replicate, "tp": layout.tensor, "pp": layout.pipeline}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    words += [f"offload {layout.offload}"] if layout.offload != "none" else []
    words += [f"{layout.checkpointing} checkpointing"] if layout.checkpointing != "none" else []
    batch = f"batch {layout.batch}"
    batch += f" in {layout.microbatches}" if layout.microbatches > 1 else ""
    batch += f" x {layout.accumulate}" if layout.accumulate > 1 else ""
    return ", ".join([*words, batch])


def assumptions(job: Job, calibration: Calibration) -> list[str]:
    """What the figures rest on, in words."""
    losses = {
        "huggingface": "logits and an FP32 copy of them at once, the output dropped before the backward pass",
        "huggingface_kept": "logits and an FP32 copy of them at once, the output kept through the backward pass",
        "chunked": f"head and loss for {job.chunk} tokens at a time",
    }
    lines = [
        "attention of the FlashAttention kind (no S x S matrix)",
        f"loss: {losses[job.loss]}",
        f"optimizer {job.optimizer}, {job.precision}",
        f"{job.host_bytes / 1e9:.0f} GB of host memory per machine",
        f"{job.network_bytes / 1e9:g} GB/s per card between machines",
        f"memory {calibration}",
        "0 to 12 % over what PyTorch asks for is lost to fragmentation, 0.4 to 1.2 GB go to CUDA",
    ]
    if job.shape.positions and job.length > job.shape.positions:
        lines.append(f"{job.length} tokens are more than the {job.shape.positions} that the configuration names")
    if not job.shape.known:
        lines.append(
            f"the layer code of {job.shape.model_type!r} is not known; it is taken to be like Llama's (--trace)"
        )
    if job.shape.tower is not None:
        lines.append("the vision tower counts with its weights; its activations are not counted")
    return lines


def as_json(plan: Plan, model: str, calibration: Calibration, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The plan as plain values; GB are 10^9 bytes."""
    shown = plan.candidates[:_LISTED]
    best = plan.best
    return {
        "best": None if best is None else _candidate(plan.job, best, model),
        "candidates": [_candidate(plan.job, candidate, model) for candidate in shown],
        "rejected": [_rejected(item) for item in plan.rejected],
        "assumptions": assumptions(plan.job, calibration),
        **(extra or {}),
    }


def _candidate(job: Job, candidate: Candidate, model: str) -> dict[str, Any]:
    slow, fast = candidate.time.rate
    return {
        "strategy": candidate.layout.strategy,
        "settings": _settings(job, candidate.layout),
        "memory": _memory(candidate.memory),
        "time": {
            "tokens_per_s_low": round(slow, 1),
            "tokens_per_s_high": round(fast, 1),
            "step_s": round(candidate.time.step, 4),
            "communication_gb": round(candidate.time.sent / 1e9, 3),
            "exposed_communication_s": round(candidate.time.exposed, 4),
            "offload_s": round(candidate.time.offload, 4),
            "bubble": round(candidate.time.bubble, 4),
        },
        "levers": [
            {"name": lever.name, "saves_gb": round(lever.saves / 1e9, 3), "where": lever.where}
            for lever in candidate.levers(job)
        ],
        "recipe": recipe_text(job, candidate, model),
    }


def _settings(job: Job, layout: Layout) -> dict[str, Any]:
    return {
        "class": class_name(job, layout),
        "arguments": strategy_arguments(job, layout),
        "batch_size": layout.batch,
        "accumulate_grad_batches": layout.accumulate,
        "checkpointing": layout.checkpointing,
        "offload": layout.offload,
        "data_parallel_shard": layout.shard,
        "data_parallel_replicate": layout.replicate,
        "tensor_parallel": layout.tensor,
        "pipeline_parallel": layout.pipeline,
        "microbatches": layout.microbatches,
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "peak_gb": round(memory.peak / 1e9, 3),
        "low_gb": round(memory.low / 1e9, 3),
        "high_gb": round(memory.high / 1e9, 3),
        "host_gb": round(memory.host / 1e9, 3),
        "disk_gb": round(memory.disk / 1e9, 3),
        "components_gb": {name: round(value / 1e9, 3) for name, value in memory.components.items()},
        "where": memory.where,
    }


def _rejected(item: Rejected) -> dict[str, Any]:
    found: dict[str, Any] = {"strategy": item.layout.strategy, "layout": describe(item.layout), "reason": item.reason}
    return found if item.memory is None else found | {"memory": _memory(item.memory)}


def print_plan(
    plan: Plan, calibration: Calibration, *, tokens: float | None = None, price: float | None = None
) -> None:
    """The table, the bars, the recommendation with its levers, what was rejected and why, the assumptions."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120, highlight=False)
    job = plan.job
    console.print(
        f"[bold]{job.shape.name}[/bold]: {job.shape.parameters / 1e9:.2f} B parameters, {job.goal}, "
        f"{job.length} tokens, {job.world} x {job.gpu.name} ({job.gpu.memory / 1e9:.1f} GB)"
    )
    if plan.candidates:
        _print_table(console, plan)
    _print_bars(console, plan)
    if plan.best is not None:
        _print_best(console, job, plan.best, tokens, price)
    _print_rejected(console, plan)
    for line in assumptions(job, calibration):
        console.print(f"  [dim]- {line}[/dim]", markup=True)


def _print_table(console: Console, plan: Plan) -> None:
    from rich.table import Table

    table = Table(title=None, pad_edge=False)
    for column in ("", "strategy", "sizes"):
        table.add_column(column)
    for column in ("GB per GPU", "host GB", "tokens/s", "peak at"):
        table.add_column(column, justify="left" if column == "peak at" else "right")
    for index, candidate in enumerate(plan.candidates[:_SHOWN]):
        memory, (slow, fast) = candidate.memory, candidate.time.rate
        table.add_row(
            "*" if index == 0 else "",
            candidate.layout.strategy,
            describe(candidate.layout),
            f"{memory.peak / 1e9:.1f} ({memory.low / 1e9:.1f}-{memory.high / 1e9:.1f})",
            f"{memory.host / 1e9:.0f}",
            f"{slow:,.0f}-{fast:,.0f}",
            memory.where,
        )
    console.print(table)


def _print_bars(console: Console, plan: Plan) -> None:
    from rich.text import Text

    limit = plan.job.gpu.memory
    rows = [(candidate.layout, candidate.memory) for candidate in plan.candidates[:_SHOWN]]
    rows += [(item.layout, item.memory) for item in plan.rejected[:2] if item.memory is not None]
    if not rows:
        return
    most = max(limit, *(memory.peak for _, memory in rows))
    for layout, memory in rows:
        line = Text(f"{layout.strategy:<8}")
        line.append_text(_bar(memory, most, limit))
        line.append(f" {memory.peak / 1e9:.1f}")
        console.print(line)
    legend = Text(" " * 8)
    for name, colour in COLOURS.items():
        if any(memory.components[name] > 0 for _, memory in rows):
            legend.append("█ ", style=colour)
            legend.append(f"{name}  ")
    legend.append(f"| limit {limit / 1e9:.1f} GB")
    console.print(legend)


def _bar(memory: Memory, most: float, limit: float) -> Any:
    from rich.text import Text

    bar, done, cells = Text(), 0.0, 0
    for name, colour in COLOURS.items():
        done += memory.components[name]
        width = round(done / most * _WIDTH) - cells
        bar.append("█" * width, style=colour)
        cells += width
    bar.append(" " * (_WIDTH - cells))
    mark = min(_WIDTH - 1, round(limit / most * _WIDTH))
    free = bar.plain[mark : mark + 1] == " "
    return bar[:mark] + Text("|", style="bold") + bar[mark + 1 :] if free else bar


def _print_best(console: Console, job: Job, best: Candidate, tokens: float | None, price: float | None) -> None:
    layout, time = best.layout, best.time
    console.print(f"[bold]{class_name(job, layout)}[/bold] ({describe(layout)}): peak at {best.memory.where}")
    found = best.levers(job)
    if found:
        console.print(f"  next lever: {found[0].name}, saves {found[0].saves / 2**30:.1f} GiB")
    console.print(
        f"  step {time.low:.2f}-{time.high:.2f} s; each card sends {time.sent / 1e9:.2f} GB per step, "
        f"{time.exposed:.2f} s of that not hidden; offload {time.offload:.2f} s; pipeline waits {time.bubble:.0%}"
    )
    longest, batch = longest_sequence(job, layout), largest_batch(job, layout)
    console.print(f"  longest sequence that fits: {longest}; largest batch per GPU: {batch}")
    spent = budget(job, time, tokens or 1e9, price)
    per_day = " to ".join(f"{value / 1e6:,.0f}" for value in spent.tokens_per_day)
    console.print(f"  {per_day} million tokens per day; {_budget_words(spent.hours, spent.cost, tokens)}")


def _budget_words(hours: tuple[float, float], cost: tuple[float, float] | None, tokens: float | None) -> str:
    words = f"{(tokens or 1e9) / 1e9:g} billion tokens take {hours[0]:,.1f} to {hours[1]:,.1f} hours"
    return words if cost is None else f"{words} and cost {cost[0]:,.0f} to {cost[1]:,.0f}"


def _print_rejected(console: Console, plan: Plan) -> None:
    if plan.rejected:
        console.print("rejected:")
    for item in plan.rejected[:_SHOWN]:
        console.print(f"  {item.layout.strategy} ({describe(item.layout)}): {item.reason}", soft_wrap=True)


def component_table(memory: Memory, limit: float) -> str:
    """The components of a predicted peak as lines of text, largest first; for a log or an error message."""
    lines = [f"{name:<24}{value / 1e9:8.2f} GB" for name, value in memory.components.items() if value > 0]
    lines.append(f"{'predicted peak':<24}{memory.peak / 1e9:8.2f} GB of {limit / 1e9:.2f} GB, at {memory.where}")
    return "\n".join(lines)
