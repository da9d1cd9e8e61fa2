"""Every optimizer of torch over stages and cut layers takes the steps that it takes in one process, or is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._tensor_pipeline_optimizers import naming_empty_stages, prepare_optimizers
from tests.harness.ranks import ranks
from tests.pipeline.references import Batch, batch_of, full, model_of
from tests.tensor_pipeline.applied import applied

# Gradients are added in another order, which moves them by about 1e-8. Beside the usual epsilon of 1e-8 that would be a
# whole step in either direction where a gradient is zero; beside this one it is a step of 1e-7.
EPS: dict[str, Any] = {"eps": 1e-3}
WORKING: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [EPS],
    "Adagrad": [{**EPS, "fused": True}, {**EPS, "foreach": True}],
    "Adam": [EPS, {**EPS, "amsgrad": True, "fused": True}],
    "AdamW": [EPS, {**EPS, "fused": True}, {**EPS, "foreach": True}],
    "Adamax": [EPS],
    "ASGD": [{}, {"foreach": True}],
    "NAdam": [EPS],
    "RAdam": [EPS],
    "RMSprop": [EPS, {**EPS, "momentum": 0.9, "centered": True}],
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {"fused": True}],
}
# Where stages have their parameters whole.
WHOLE: dict[str, list[dict[str, Any]]] = {"Adafactor": [{}], "Rprop": [{}]}
CUT: dict[str, Any] = {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "microbatches": 1, "self_check": False}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "microbatches": 2}
LAYOUTS = [CUT, STAGES]


def stepped(model: nn.Module, batch: Batch, kind: str, options: dict[str, Any]) -> dict[str, nn.Parameter]:
    """The parameters after two steps, norms in a group of their own."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "norm" in name]},
    ]
    optimizer = getattr(torch.optim, kind)(groups, lr=1e-2, **options)
    prepare_optimizers([optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
    return named


def orthogonalised(model: nn.Module, batch: Batch) -> dict[str, nn.Parameter]:
    """The matrices of the blocks after one step of Muon, for which matrices are wholes."""
    named = {n: p for n, p in model.named_parameters() if p.dim() == 2 and ".layers." in n}
    optimizer = torch.optim.Muon(named.values(), lr=1e-2)
    model(**batch, use_cache=False).loss.backward()
    optimizer.step()
    return named


@ranks(2)
def test_every_optimizer_of_torch() -> None:
    whole, batch = model_of("llama", hidden=32, layers=2, tie=False), batch_of(4, 9)
    for kind, settings in {**WORKING, **WHOLE}.items():
        for options in settings:
            expected = stepped(copy.deepcopy(whole), batch, kind, options)
            for layout in LAYOUTS if kind in WORKING else [STAGES]:
                model, _ = applied(copy.deepcopy(whole), **layout)
                for name, parameter in stepped(model, batch, kind, options).items():
                    error = float((full(parameter.detach()) - expected[name].detach()).abs().max())
                    assert error < 2e-6, (kind, options, layout, name, error)
    expected = orthogonalised(copy.deepcopy(whole), batch)
    before = dict(whole.named_parameters())
    for layout in LAYOUTS:
        model, _ = applied(copy.deepcopy(whole), **layout)
        for name, parameter in orthogonalised(model, batch).items():
            error = (full(parameter.detach()) - expected[name].detach()).norm()
            moved = (expected[name].detach() - before[name].detach()).norm()
            # Five products in BF16, 8 bits, and in another order, each of which trebles the small singular values and
            # what rounding has left of them. In float32 the error is 1e-5; halves made orthogonal apart are off by 0.5.
            assert error < 0.25 * moved, (layout, name, error / moved)


@ranks(1)
def test_optimizers_that_cannot_step_over_parts() -> None:
    whole = nn.Linear(2, 2)
    parts = distribute_module(copy.deepcopy(whole), init_device_mesh("cpu", (1,)))
    for kind, layer in (("LBFGS", whole), ("SparseAdam", whole), ("Adafactor", parts), ("Rprop", parts)):
        optimizer = getattr(torch.optim, kind)(layer.parameters())
        with pytest.raises(ConfigurationError, match=rf"{kind} .*\n?.*such as AdamW"):
            prepare_optimizers([optimizer])


def test_a_rank_without_parameters_to_train_says_why() -> None:
    message = "stages of rank 1 have none of the parameters"
    with pytest.raises(ConfigurationError, match=message), naming_empty_stages("rank 1"):
        torch.optim.SGD([])
    with pytest.raises(ValueError, match="Invalid learning rate"), naming_empty_stages("rank 1"):
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=-1)


def test_no_optimizer_of_torch_is_forgotten() -> None:
    known = {*WORKING, *WHOLE, "LBFGS", "SparseAdam", "Muon"}
    found = {n for n in torch.optim.__all__ if isinstance(getattr(torch.optim, n), type)} - {"Optimizer"}
    assert found == known
