"""How Lightning's fit loop counts batches, and what has to be set right in its counters when a run resumes.

Lightning restores its counters but starts the data anew. The data position is restored elsewhere (``sampler.py``); here
is the other half: how many batches the loop believes to be done, and two states in which it would go wrong.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_swift.data.sampler import DataOrder, Position, TrainingStream

__all__ = ["batches_trained", "pass_is_over", "resume"]


def batches_trained(trainer: Trainer) -> int:
    """Training batches since the first step of the run; resumed runs continue the count."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return int(progress.total.processed)


def pass_is_over(trainer: Trainer) -> bool:
    """Whether the fit loop has trained on as many batches as it wants of this epoch (``limit_train_batches``)."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.current.processed >= trainer.num_training_batches)


def resume(
    trainer: Trainer, order: DataOrder, global_batch: int, *, start: Position, saved_batch: int | None
) -> tuple[TrainingStream, int]:
    """The stream from ``start`` on, and the number of batches the fit loop counts as done in the pass that comes.

    Args:
        trainer: The trainer whose loops have been restored and whose training data is about to be set up.
        order: The order of samples.
        global_batch: Samples per batch of all data-parallel ranks together.
        start: Where training goes on.
        saved_batch: ``global_batch`` of the checkpoint that was loaded; None if there was none.
    """
    stream = TrainingStream(order, global_batch, start=start, trained=lambda: batches_trained(trainer))
    counted = 0
    if saved_batch is not None and trainer.fit_loop.is_resuming:
        in_epoch = stream.anchor.offset > 0
        other_length = saved_batch != global_batch or start.offset > 0
        batches = _limited(trainer, stream.epoch_batches) if other_length else None
        _settle_epoch(trainer, finished=not in_epoch, batches=batches)
        loop: Any = trainer.fit_loop
        if in_epoch and loop.restarting:
            counted = loop.epoch_loop.batch_progress.current.processed
    return stream, counted


def _limited(trainer: Trainer, batches: int) -> int:
    limit = trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def _settle_epoch(trainer: Trainer, *, finished: bool, batches: int | None) -> None:
    """Make a restored fit loop agree with the data about whether an epoch had ended at the checkpoint.

    * Lightning closes an epoch that ``max_steps`` cut short and counts its rest as part of the next one: reopen it.
    * With ``max_steps`` and a checkpoint from the end of an epoch, it pulls one batch beyond the old epoch and skips
      the rest of the new one (lightning 2.6.6): start the new epoch with counters at zero.
    * With another number of ranks, a finished epoch has another number of batches than the counter says, and it would
      be taken for an unfinished one: count what the new length is.

    Args:
        trainer: The trainer whose loops have been restored and whose data is about to be set up.
        finished: Whether the data position is at the start of an epoch.
        batches: Batches of a whole epoch as the fit loop will expect them, where that differs from the checkpoint's.
    """
    # Lightning declares its counters by a base class without most of their fields.
    loop: Any = trainer.fit_loop
    epochs, progress = loop.epoch_progress, loop.epoch_loop.batch_progress
    closed = epochs.total.processed == epochs.total.started and epochs.total.started > 0
    if not finished:
        if closed:
            for tracker in (epochs.total, epochs.current):
                tracker.processed -= 1
                tracker.completed = min(tracker.completed, tracker.processed)
            loop.restarting = True
    elif not loop.restarting:
        return
    elif closed:
        if epochs.total.completed < epochs.total.processed:
            epochs.increment_completed()
        progress.reset_on_run()
    elif batches is not None:
        current = progress.current
        current.completed += batches - current.processed
        current.ready = current.started = current.processed = batches
        progress.is_last_batch = True
