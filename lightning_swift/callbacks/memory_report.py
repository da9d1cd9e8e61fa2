"""``MemoryReport``: predicted and measured peak of each run, kept for later plans; a useful answer to out of memory."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_swift.planner.calibration import Record, record_run
from lightning_swift.planner.levers import levers
from lightning_swift.planner.memory import Memory, predict_memory
from lightning_swift.planner.report import component_table
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.strategies._planning import question

__all__ = ["MemoryReport"]

_CURES = 5


class MemoryReport(L.Callback):
    """Compares the planner's prediction with what the run takes.

    After training, predicted and measured peak of the GPU are added to a small JSON file, whose ratio
    ``lightning-swift plan`` uses for the same kind of card. When the GPU runs out of memory, the predicted components
    and the ranked cures are printed before the error. Models and strategies that the planner does not know are left
    alone. Nothing is recorded on a CPU.

    Args:
        record: Add the run to the file (``LIGHTNING_SWIFT_CALIBRATION`` names another one than the user's own).

    Attributes:
        predicted: The prediction for the largest batch so far, None before the first one.
    """

    def __init__(self, record: bool = True) -> None:
        self._record = record
        self._asked: tuple[Job, Layout] | None = None
        self._largest = (0, 0)
        self.predicted: Memory | None = None

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        ids = batch.get("input_ids") if hasattr(batch, "get") else None
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return
        size = (int(ids.shape[0]), int(ids.shape[1]))
        if size[0] * size[1] <= self._largest[0] * self._largest[1]:
            return
        self._largest = size
        self._asked = question(trainer, pl_module, *size)
        self.predicted = None if self._asked is None else predict_memory(*self._asked)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.predicted is None or self._asked is None or not torch.cuda.is_available():
            return
        measured = float(torch.cuda.max_memory_allocated())
        rank_zero_info(
            "MemoryReport: predicted %.2f GB of tensors per GPU, measured %.2f GB.",
            self.predicted.requested / 1e9,
            measured / 1e9,
        )
        self.keep(measured, is_first=trainer.is_global_zero)

    def keep(self, measured: float, *, is_first: bool = True) -> None:
        """Add a measured peak (bytes of tensors) to the file; a file that cannot be written is a warning."""
        if not self._record or not is_first or self._asked is None or self.predicted is None:
            return
        job, layout = self._asked
        try:
            record_run(Record(job.gpu.name, layout.strategy, self.predicted.requested, measured))
        except OSError as error:
            rank_zero_warn(f"MemoryReport: the run could not be recorded ({error}).")

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError):
            rank_zero_warn(self.advice())

    def advice(self) -> str:
        """The predicted components and what would save most, as lines of text."""
        if self.predicted is None or self._asked is None:
            return "The GPU ran out of memory; the planner does not know this model or strategy."
        job, layout = self._asked
        lines = [
            "The GPU ran out of memory. What the planner expected:",
            component_table(self.predicted, job.gpu.memory),
        ]
        cures = levers(job, layout)[:_CURES]
        lines += ["What would save most:"] if cures else []
        lines += [f"  {cure.name}: {cure.saves / 1e9:.1f} GB" for cure in cures]
        return "\n".join(lines)
