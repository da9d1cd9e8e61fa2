"""Draws the memory of each candidate as stacked bars: a PNG by matplotlib, or an HTML page by nothing but text."""

from __future__ import annotations

import html
from pathlib import Path

from lightning_swift.errors import ConfigurationError
from lightning_swift.planner.memory import COMPONENTS, Memory
from lightning_swift.planner.report import describe
from lightning_swift.planner.search import Plan

__all__ = ["plot_plan"]

_COLOURS = (
    *("#4c78a8", "#72b7b2", "#9ecae9", "#b279a2", "#eeca3b"),
    *("#54a24b", "#e45756", "#ff9da6", "#bab0ac", "#9d755d"),
)
# More bars than these are no drawing any more.
_CANDIDATES, _REJECTED = 20, 3


def plot_plan(plan: Plan, path: Path) -> None:
    """Write the bars to ``path``.

    Raises:
        ConfigurationError: Another ending than .png or .html, matplotlib missing for a PNG, or nothing to write to.
    """
    rows = [(f"{c.layout.strategy} ({describe(c.layout)})", c.memory) for c in plan.candidates[:_CANDIDATES]]
    near = [r for r in plan.rejected if r.memory is not None][:_REJECTED]
    rows += [(f"{r.layout.strategy} ({describe(r.layout)})", r.memory) for r in near if r.memory is not None]
    writers = {".png": _png, ".html": _html}
    writer = writers.get(path.suffix.lower())
    if writer is None:
        raise ConfigurationError(
            f"{path.suffix or 'no ending'} cannot be drawn.", where=f"--plot {path}", fix="Name it .png or .html."
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(rows, plan.job.gpu.memory, path)
    except OSError as error:
        raise ConfigurationError(f"cannot be written ({error}).", where=f"--plot {path}") from error


def _png(rows: list[tuple[str, Memory]], limit: float, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "matplotlib is not installed.",
            where=f"--plot {path}",
            fix="pip install lightning-swift[plot], or write an .html.",
        ) from error
    figure = Figure(figsize=(10, 1 + 0.4 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    names = [name for name, _ in rows]
    for component, colour in zip(COMPONENTS, _COLOURS, strict=True):
        widths = [memory.components[component] / 1e9 for _, memory in rows]
        axes.barh(names, widths, left=left, color=colour, label=component)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.axvline(limit / 1e9, color="black", linestyle="--")
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.set_xlabel("GB per GPU")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path)


def _html(rows: list[tuple[str, Memory]], limit: float, path: Path) -> None:
    most = max([limit, *(memory.peak for _, memory in rows)]) * 1.02
    bars = "".join(_row(name, memory, most, limit) for name, memory in rows)
    legend = "".join(
        f'<span style="color:{colour}">&#9632;</span> {name} &nbsp;'
        for name, colour in zip(COMPONENTS, _COLOURS, strict=True)
    )
    style = "body{font-family:sans-serif}.b{position:relative;height:18px;display:flex;margin-bottom:8px}"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title>Memory plan</title><style>{style}</style>"
        f"<p>{legend} | card: {limit / 1e9:.1f} GB</p>{bars}\n",
        encoding="utf-8",
    )


def _row(name: str, memory: Memory, most: float, limit: float) -> str:
    parts = "".join(
        f'<div title="{component}: {memory.components[component] / 1e9:.2f} GB" '
        f'style="background:{colour};width:{100 * memory.components[component] / most:.3f}%"></div>'
        for component, colour in zip(COMPONENTS, _COLOURS, strict=True)
    )
    mark = f'<div style="position:absolute;left:{100 * limit / most:.3f}%;border-left:2px dashed;height:18px"></div>'
    return f"<div>{html.escape(name)}: {memory.peak / 1e9:.1f} GB</div><div class=b>{parts}{mark}</div>"
