"""Which wishes of a job no strategy of this package fulfils in a given layout, whatever memory there is."""

from __future__ import annotations

from lightning_swift.planner.settings import Job, Layout

__all__ = ["not_together"]


def not_together(job: Job, layout: Layout) -> str | None:
    """Why the layout cannot have what the job asks for, in a sentence; None if it can."""
    if job.goal == "qlora" and layout.strategy in ("tp_pp", "fsdp"):
        return "quantised layers are cut over ranks by ZeRO only"
    if job.loss == "chunked" and layout.strategy == "tp_pp":
        return "a loss in chunks needs the head and the layers before it together"
    if job.optimizer == "adamw_8bit" and layout.strategy != "ddp":
        return "bitsandbytes' optimizer needs whole parameters and states (ddp)"
    if job.dora and layout.tensor > 1:
        return "magnitudes of DoRA are norms of whole rows, which tensor parallelism cuts"
    return None
