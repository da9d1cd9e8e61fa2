"""Gradient norms and clipping, whatever the parameters are sharded over."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from lightning_swift.errors import ModelError
from lightning_swift.parallel import gradients
from lightning_swift.parallel.gradients import clip_by_norm, clip_by_value, total_norm
from lightning_swift.strategies import _precision
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import UserModule, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import fit, full, mean_losses, norm_of, single_process

# As in test_parity: 20 steps of AdamW amplify the last digit of float32.
AFTER_TRAINING = 3e-5
# A norm is a sum of 2e5 squares in float32, added in another order: a few units in the last place.
NORM = 2e-6


def parameters_on_every_mesh() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Plain, sharded on one mesh, sharded twice, sharded unevenly, replicated; and the same as plain tensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(3)
    layouts: list[Any] = [
        None,
        (mesh["b"], [Shard(0)]),
        (mesh["a"], [Shard(0)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(0), Shard(1)]),
        (mesh, [Replicate(), Replicate()]),
        # One row for two ranks: the second holds nothing.
        (mesh["b"], [Shard(0)]),
    ]
    ours, theirs = [], []
    for index, layout in enumerate(layouts):
        value, gradient = torch.randn(2, 2, 4), torch.randn(2, 2, 4) * 10**index
        if index == len(layouts) - 1:
            value, gradient = value[:1], gradient[:1]
        theirs.append(nn.Parameter(value.clone()))
        theirs[-1].grad = gradient.clone()
        shard = (
            (lambda t, layout=layout: t) if layout is None else lambda t, layout=layout: distribute_tensor(t, *layout)
        )
        ours.append(nn.Parameter(shard(value)))
        ours[-1].grad = shard(gradient)
    return ours, theirs


@ranks(4)
def test_norm_and_clipping_agree_with_torch_on_the_whole_gradients() -> None:
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        ours, theirs = parameters_on_every_mesh()
        expected = nn.utils.get_total_norm([p.grad for p in theirs], norm_type)
        found = total_norm([p.grad for p in ours], norm_type)
        assert type(found) is torch.Tensor
        assert found.item() == pytest.approx(expected.item(), rel=NORM)
        assert clip_by_norm(ours, 2.5, norm_type).item() == found.item()
        nn.utils.clip_grad_norm_(theirs, 2.5, norm_type)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(full(mine.grad), other.grad, rtol=NORM, atol=0)
    ours, theirs = parameters_on_every_mesh()
    clip_by_value(ours, 0.7)
    nn.utils.clip_grad_value_(theirs, 0.7)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(full(mine.grad), other.grad)


@ranks(2)
def test_norms_of_half_precision_gradients_are_float32() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    # Their bfloat16 norm would be rounded to 8 bits, and squares of 1e-30 would vanish in float16.
    values = torch.full((1000,), 1.0, dtype=torch.bfloat16)
    parameter = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(values, mesh, [Shard(0)])
    norm = total_norm([parameter.grad])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(1000), rel=NORM)


@ranks(2)
def test_a_norm_that_is_not_finite_spoils_every_gradient_as_in_torch() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    for bad in (math.nan, math.inf):
        gradients_ = [torch.tensor([1.0, bad, 2.0, 3.0]), torch.ones(2)]
        parameters = [nn.Parameter(distribute_tensor(torch.zeros_like(g), mesh, [Shard(0)])) for g in gradients_]
        theirs = [nn.Parameter(torch.zeros_like(g)) for g in gradients_]
        for mine, other, gradient in zip(parameters, theirs, gradients_, strict=True):
            mine.grad, other.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient.clone()
        norm = clip_by_norm(parameters, 1.0)
        expected = nn.utils.clip_grad_norm_(theirs, 1.0)
        assert norm.isnan().item() == expected.isnan().item()
        assert norm.isinf().item() == expected.isinf().item()
        for mine, other in zip(parameters, theirs, strict=True):
            torch.testing.assert_close(full(mine.grad), other.grad, equal_nan=True, rtol=0, atol=0)


@ranks(2)
def test_a_gradient_that_waits_for_its_reduction_is_refused() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    partial = torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, [Partial()])
    for action in (lambda: total_norm([partial]), lambda: clip_by_value([parameter], 1.0)):
        parameter.grad = partial.detach()
        with pytest.raises(ModelError, match="reduction"):
            action()


def test_without_gradients_the_norm_is_zero() -> None:
    assert total_norm([]).item() == 0
    assert clip_by_norm([nn.Parameter(torch.ones(2))], 1.0).item() == 0


class Norms:
    """Records what the strategy's clipping returns, by standing in for it in the plugin's module."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, parameters: Any, max_norm: float, **stages: Any) -> torch.Tensor:
        norm = gradients.clip_by_norm(list(parameters), max_norm, **stages)
        self.values.append(float(norm))
        return norm


@ranks(2)
def test_trainer_clipping_is_a_single_process() -> None:
    # Norms are about 1 here, so 0.3 clips every step, and 0.002 about a tenth of all elements.
    steps = 8
    losses, first, expected = single_process(tiny_model(layers=2).train(), world=2, steps=steps, clip_norm=0.3)
    norms = _precision.clip_by_norm = Norms()
    module, recorded = fit(UserModule(layers=2), FSDPBF16Strategy("32-true"), steps=steps, gradient_clip_val=0.3)
    assert max(abs(a - b) for a, b in zip(mean_losses(module), losses, strict=True)) <= AFTER_TRAINING
    assert norms.values[0] == pytest.approx(norm_of(first), rel=NORM)
    assert norms.values == pytest.approx(expected, rel=1e-3)  # their models have drifted by AFTER_TRAINING
    losses, first, _ = single_process(tiny_model(layers=2).train(), world=2, steps=steps, clip_value=0.002)
    assert sum((g.abs() > 0.002).double().mean() for g in first.values()) / len(first) > 0.02
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    module, recorded = fit(UserModule(layers=2), FSDPBF16Strategy("32-true"), steps=steps, **kwargs)
    assert recorded.gradients
    assert max(abs(a - b) for a, b in zip(mean_losses(module), losses, strict=True)) <= AFTER_TRAINING


@ranks(4)
def test_trainer_clipping_under_hybrid_sharding_offload_and_accumulation() -> None:
    losses, _, _ = single_process(tiny_model(layers=2).train(), world=4, clip_norm=0.3, batch=1, accumulate=2, steps=10)
    strategy = FSDPBF16Strategy("32-true", data_parallel_replicate=2, cpu_offload=True, accumulate_without_sync=True)
    module, _ = fit(UserModule(layers=2), strategy, gradient_clip_val=0.3, batch=1, accumulate_grad_batches=2, steps=10)
    assert max(abs(a - b) for a, b in zip(mean_losses(module), losses, strict=True)) <= AFTER_TRAINING
    assert dist.get_world_size() == 4
