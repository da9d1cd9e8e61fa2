"""Forward passes only: every stage takes all microbatches in turn.

torch's own ``schedule.eval()`` fails for V-shaped schedules (2.13) and gives no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.parallel._pipeline_batch import PipelineBatch
from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.stages import Stage

__all__ = ["evaluate"]


def evaluate(
    stages: Sequence[Stage],
    batch: PipelineBatch,
    settings: ScheduleSettings,
    *,
    group: dist.ProcessGroup,
    activation_dtype: torch.dtype,
    logits: bool,
) -> list[Any]:
    """Run all microbatches through the stages of this rank.

    Returns:
        What the last stage returned for each microbatch; empty on ranks without it.
    """
    run = _Run(batch, settings, group, activation_dtype, logits)
    numbers = settings.stage_ids(dist.get_rank(group), dist.get_world_size(group))
    for number, stage in zip(numbers, stages, strict=True):
        run.stage(number, stage)
    return run.finish()


class _Run:
    def __init__(
        self,
        batch: PipelineBatch,
        settings: ScheduleSettings,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        logits: bool,
    ) -> None:
        self._microbatches = batch.microbatches(wants_logits=logits)
        self._settings, self._group, self._dtype = settings, group, dtype
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._here: dict[int, list[Tensor]] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._results: list[Any] = []

    def stage(self, number: int, stage: Stage) -> None:
        outputs = []
        for index, (ids, keywords) in enumerate(self._microbatches):
            inputs = ids if stage.first else self._receive(number, index, stage, ids)
            output = stage(inputs, **keywords)
            if stage.last:
                self._results.append(output)
            elif self._waits(number):
                outputs.append(output)
            else:
                self._send(number, output)
        for output in outputs:
            self._send(number, output)

    def finish(self) -> list[Any]:
        for work, _ in self._sent:
            work.wait()
        return self._results

    def _waits(self, number: int) -> bool:
        """Whether outputs are sent only after all inputs have come: where both go over one connection in both ways."""
        return number > 0 and self._rank_of(number - 1) == self._rank_of(number + 1) != self._rank

    def _rank_of(self, number: int) -> int:
        return self._settings.rank_of(number, self._size)

    def _receive(self, number: int, index: int, stage: Stage, ids: Tensor) -> Tensor:
        source = self._rank_of(number - 1)
        if source == self._rank:
            return self._here[number][index]
        shape = (ids.shape[0], ids.shape[1] // stage.sequence_shards, stage.hidden_size)
        received = torch.empty(shape, dtype=self._dtype, device=ids.device)
        dist.recv(received, group=self._group, group_src=source)
        return received

    def _send(self, number: int, output: Tensor) -> None:
        target = self._rank_of(number + 1)
        if target == self._rank:
            self._here.setdefault(number + 1, []).append(output)
            return
        output = output.contiguous()
        work = dist.isend(output, group=self._group, group_dst=target)
        # Kept until it has been sent.
        self._sent.append((work, output))
