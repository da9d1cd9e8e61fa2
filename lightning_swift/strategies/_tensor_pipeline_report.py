"""The table that a fit with tensor and pipeline parallelism begins with."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_swift.strategies._tensor_pipeline_model import Pipeline

__all__ = ["startup_table"]

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def startup_table(pipeline: Pipeline) -> str:
    """Mesh, schedule and stages of a run, as lines of text."""
    sizes, schedule = pipeline.sizes, pipeline.schedule
    lines = [f"Mesh: {sizes}; {sizes.data_parallel} different batches at a time."]
    if sizes.pp > 1:
        lines.append(
            f"Schedule: {schedule.name}, {schedule.microbatches} microbatches, {schedule.stages_per_rank} "
            f"{'stage' if schedule.stages_per_rank == 1 else 'stages'} on each pipeline rank; a rank is predicted to "
            f"wait {100 * schedule.bubble(sizes.pp):.1f} % of the time."
        )
    lines += _aligned([("stage", "pipeline rank", "layers", "parameters", "share of cost"), *_rows(pipeline)])
    return "\n".join(lines)


def _rows(pipeline: Pipeline) -> list[tuple[str, ...]]:
    last = len(pipeline.bounds) - 1
    rows: list[tuple[str, ...]] = []
    for number, (start, end) in enumerate(pipeline.bounds):
        parts = ["embedding"] if number == 0 else []
        parts.append(str(start) if end - start == 1 else f"{start}-{end - 1}")
        parts += ["head"] if number == last else []
        rows.append(
            (
                str(number),
                str(pipeline.schedule.rank_of(number, pipeline.sizes.pp)),
                ", ".join(parts),
                _short(pipeline.parameters[number]),
                f"{100 * pipeline.shares[number]:.1f} %",
            )
        )
    return rows


def _short(count: int) -> str:
    for unit, letter in _UNITS:
        if count >= unit:
            return f"{count / unit:.2f} {letter}"
    return str(count)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
