"""The harness itself: results, tracebacks by rank, deaths and hangs are all reported."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import RanksFailed, ranks, run_ranks


@ranks(2)
def test_ranks_talk_to_each_other() -> None:
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0
    # An import that fails while the server starts is passed over in silence, and each rank would do it all again.
    assert "tests.harness.preload" in sys.modules


def _raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def _die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _hang() -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("body", "text", "deadline"),
    [
        (_raise_on_one, "ValueError: only here", 5.0),
        (_die_on_one, "died without a report (exit code 7)", 5.0),
        (_hang, "timed out", 1.0),
    ],
)
def test_every_kind_of_failure_is_reported(body: object, text: str, deadline: float) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(body, 2, deadline=deadline)
    assert text in str(caught.value)
    assert "--- rank 1 ---" in str(caught.value)


def test_the_result_of_rank_0_comes_back() -> None:
    assert run_ranks(_value, 2) == "rank 0"


def _value() -> str:
    return f"rank {dist.get_rank()}"
