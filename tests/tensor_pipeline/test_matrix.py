"""Every layout over every architecture: the loss and all gradients are those of the whole model in one process."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.schedule import ScheduleName
from tests.harness.ranks import ranks
from tests.pipeline.references import LOSS, Batch, batch_of, check_gradients, model_of
from tests.tensor_pipeline.applied import applied, expected_of, gradients_between

CUT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie": True}),
    ("llama", {"tie": False}),
    ("qwen3", {}),
    ("gemma2", {}),
    ("gemma3", {}),
    ("mistral", {}),
    ("phi3", {}),
    ("gpt_neox", {}),
    ("mixtral", {}),
    ("qwen3_moe", {}),
]
# They publish no plan, by which their layers could be cut.
UNCUT: list[tuple[str, dict[str, Any]]] = [("gpt2", {}), ("opt", {}), ("falcon", {}), ("bloom", {})]
SCHEDULES = get_args(ScheduleName)
# As few microbatches as the schedule allows: each costs every rank a pass through Python.
PP2 = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "microbatches": 2}
PP4 = {"pipeline_parallel_size": 4, "tensor_parallel_size": 1, "microbatches": 4}
# The rule decides whose gradients are partial: that the self-check agrees with it has its own test.
TP2 = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "microbatches": 1, "self_check": False}
BOTH = {**TP2, "pipeline_parallel_size": 2, "microbatches": 2}
SEQUENCE: dict[str, Any] = {"sequence_parallel": True}
ALL = {**SEQUENCE, "loss_parallel": True}
HYBRID = {"data_parallel_replicate": 2, "data_parallel_shard": 2}


def under(name: ScheduleName, options: dict[str, Any]) -> dict[str, Any]:
    twice = {"microbatches": 2 * options["microbatches"]} if name == "DualPipeV" else {}
    return {**options, "schedule": name, **twice}


def shares_of(options: dict[str, Any]) -> int:
    """Number of ranks, or groups of them, that see different data."""
    return dist.get_world_size() // options["pipeline_parallel_size"] // options["tensor_parallel_size"]


def check(kinds: list[tuple[str, dict[str, Any]]], layouts: list[dict[str, Any]], *, layers: int = 4) -> None:
    """Under sequence parallelism the length is odd, and rows have unequal numbers of targets."""
    shape = {"hidden": 32, "layers": layers}
    batches = [batch_of(8, 9, seed=seed) for seed in range(max(map(shares_of, layouts)))]
    for row, ((kind, config), results) in enumerate(zip(kinds, expected_of(kinds, batches, **shape), strict=True)):
        whole = model_of(kind, **shape, **config)
        for column, options in enumerate(layouts):
            model, share = applied(copy.deepcopy(whole), **options)
            what = f"{kind} {config} {options}"
            # Each layout with some of the architectures, and the other way round.
            if (row + column) % 3 == 0:
                check_evaluation(model, batches[share], results[share][0], what=what)
            check_one(
                model, batches[share], results[share][0], gradients_between(results, shares_of(options)), what=what
            )


def check_evaluation(model: PipelinedModel, batch: Batch, expected: float, *, what: str) -> None:
    """Before the step, as Lightning's sanity check is: it must leave shards behind."""
    with torch.no_grad():
        evaluated = float(model(**batch).loss)
    assert abs(evaluated - expected) < LOSS, f"{what}: evaluated {evaluated - expected:.1e}"


def check_one(model: PipelinedModel, batch: Batch, expected: float, gradients: dict[str, Tensor], *, what: str) -> None:
    loss = model(**batch).loss
    loss.backward()
    assert abs(float(loss.detach()) - expected) < LOSS, f"{what}: {float(loss.detach()) - expected:.1e}"
    check_gradients(model, gradients, what=what)


@ranks(2)
def test_stages_of_two_ranks_under_every_schedule() -> None:
    check([*CUT, *UNCUT], [under(name, PP2) for name in SCHEDULES])


@ranks(2)
def test_cut_layers() -> None:
    check(CUT, [TP2, {**TP2, **ALL}])


@ranks(4)
def test_stages_of_four_ranks_under_every_schedule() -> None:
    # A layer for each stage; the other schedules give each rank two of these.
    single = ("GPipe", "1F1B")
    check([*CUT, *UNCUT], [under(name, PP4) for name in single])
    check([*CUT, *UNCUT], [under(name, PP4) for name in SCHEDULES if name not in single], layers=8)


@ranks(4)
def test_two_axes_at_once() -> None:
    # Two layers on one of the stages, one on the other.
    check(CUT, [BOTH, {**BOTH, **SEQUENCE}, {**BOTH, **ALL}, PP2, TP2], layers=3)
    # Several stages on a rank, with parameters of which each tensor-parallel rank has a part of the gradient.
    several = [under(name, {**BOTH, **ALL}) for name in SCHEDULES if name not in ("GPipe", "1F1B")]
    check([("qwen3", {})], several)


@pytest.mark.slow
@ranks(8)
def test_three_axes_at_once() -> None:
    check(CUT[:-1], [{**BOTH, **ALL}, {**PP2, **HYBRID}], layers=2)
    check([("qwen3", {}), ("mixtral", {})], [{**TP2, **SEQUENCE, **HYBRID}], layers=2)
