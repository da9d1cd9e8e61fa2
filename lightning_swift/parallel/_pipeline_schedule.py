"""Builds torch's schedule for one shape of batch, with static shapes: no rank asks another for the shape it sends."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.stages import Stage

__all__ = ["ScheduleBuilder"]

# Its messages are about every schedule built, one line for each rank and shape.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.ERROR)


class ScheduleBuilder:
    """Keeps the schedule of the last shape, since each holds receive buffers for all its microbatches.

    Args:
        stages: The stages of this rank.
        settings: The schedule.
        group: The ranks of the pipeline.
        device: Where the stages compute.
        activation_dtype: Type of the hidden states between stages.

    Attributes:
        builds: How many schedules were built.
        build_seconds: Time that building them took together.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        settings: ScheduleSettings,
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        activation_dtype: torch.dtype,
    ) -> None:
        self._stages, self._settings, self._group = stages, settings, group
        self._device, self._dtype = device, activation_dtype
        self._shape: tuple[int, int] | None = None
        self._schedule: Any = None
        self._blank: Any = None
        self.builds = 0
        self.build_seconds = 0.0

    def get(self, rows: int, length: int) -> Any:
        """The schedule for microbatches of ``rows`` rows of ``length`` tokens."""
        if self._shape != (rows, length):
            begin = time.perf_counter()
            # The old buffers are freed before the new ones are made.
            self._schedule = None
            self._schedule = self._build(rows, length)
            self._shape = (rows, length)
            self.builds += 1
            self.build_seconds += time.perf_counter() - begin
        return self._schedule

    def _build(self, rows: int, length: int) -> Any:
        pp = dist.get_world_size(self._group)
        ids = self._settings.stage_ids(dist.get_rank(self._group), pp)
        n_stages = self._settings.n_stages(pp)
        stages = [
            self._stage(stage, number, n_stages, rows, length) for number, stage in zip(ids, self._stages, strict=True)
        ]
        kind: Any = get_schedule_class(self._settings.name)
        made = partial(kind, n_microbatches=self._settings.microbatches, loss_fn=_summed, scale_grads=False)
        if issubclass(kind, PipelineScheduleSingle):
            return made(stages[0])
        if self._blank is None:
            self._blank = made(stages)
            # It is never run; the stages would keep their buffers.
            self._blank._stages = []
        return _filled(self._blank, stages)

    def _stage(self, stage: Stage, number: int, n_stages: int, rows: int, length: int) -> PipelineStage:
        tokens = torch.empty(rows, length, dtype=torch.long, device="meta")
        hidden = torch.empty(
            (rows, length // stage.sequence_shards, stage.hidden_size),
            dtype=self._dtype,
            device="meta",
            requires_grad=True,
        )
        loss = torch.empty(1, device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            number,
            n_stages,
            self._device,
            input_args=tokens if stage.first else hidden,
            output_args=loss if stage.last else hidden,
            group=self._group,
        )


def _filled(blank: Any, stages: list[PipelineStage]) -> Any:
    """A schedule like ``blank``, which has not run yet, for ``stages``.

    Who does what when hangs on the number of microbatches alone, and takes torch 20 ms to work out for 64 of them.
    """
    schedule = copy.copy(blank)
    own = {name: copy.copy(value) for name, value in vars(blank).items() if isinstance(value, dict | list | set)}
    vars(schedule).update(own, _stages=stages)
    for stage in stages:
        stage.stage_index_to_group_rank = blank.stage_index_to_group_rank
    return schedule


def _summed(output: Tensor, _: Any) -> Tensor:
    """The last stage returns its share of the loss; torch asks for a function of output and target all the same."""
    return output.sum()
