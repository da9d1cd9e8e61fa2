"""Every schedule on 2 and 4 ranks computes what the whole model computes in one process."""

from __future__ import annotations

from typing import get_args

import pytest
import torch.distributed as dist

from lightning_swift.parallel.schedule import ScheduleName
from tests.harness.ranks import ranks
from tests.pipeline.references import batch_of, check_step, model_of, pipelined

SCHEDULES = get_args(ScheduleName)


def _all_schedules(kind: str, **config: object) -> None:
    pp = dist.get_world_size()
    reference, batch = model_of(kind, layers=8, **config), batch_of(8)
    for name in SCHEDULES:
        model = pipelined(model_of(kind, layers=8, **config), name, 2 * pp)
        check_step(model, reference, batch, what=f"{kind} {name} pp {pp}")


@pytest.mark.parametrize("tie", [False, True])
@ranks(2)
def test_every_schedule_on_two_ranks(tie: bool) -> None:
    _all_schedules("llama", tie=tie)


@ranks(4)
def test_every_schedule_on_four_ranks() -> None:
    _all_schedules("llama", tie=False)


@ranks(4)
def test_every_schedule_on_four_ranks_with_a_tied_embedding() -> None:
    _all_schedules("llama", tie=True)
