"""The strategy's own transforms of a model, without a Trainer around them, and what comes out against one process."""

from __future__ import annotations

import functools
import os
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_swift.parallel import anatomy
from lightning_swift.parallel.mesh import MeshSizes, build_mesh, data_parallel_rank
from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.pipeline.references import Batch, model_of, single

__all__ = ["Expected", "applied", "expected_of", "gradients_between"]

# Loss of each batch, and gradients of each.
Expected = list[tuple[float, dict[str, Tensor]]]


class Holder(L.LightningModule):
    """A module of the least that the strategy asks of one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


@functools.cache
def mesh_of(sizes: MeshSizes) -> DeviceMesh:
    """One for all models of a rank: connecting its groups takes longer than a step."""
    return build_mesh(sizes, "cpu")


def applied(model: Any, **options: Any) -> tuple[PipelinedModel, int]:
    """What the strategy makes of ``model``, which is used up, and the index of this rank's share of the data."""
    strategy = TensorPipelineStrategy("32-true", **options)
    strategy.accelerator, strategy.cluster_environment = CPUAccelerator(), TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * int(os.environ["LOCAL_WORLD_SIZE"])
    strategy.set_world_ranks()
    strategy._device_mesh = mesh_of(strategy.mesh_sizes)
    module = Holder(model)
    strategy.connect(module)
    strategy._apply(module)
    assert isinstance(module.model, PipelinedModel)
    return module.model, data_parallel_rank(strategy._device_mesh)


def expected_of(kinds: list[tuple[str, dict[str, Any]]], batches: list[Batch], **shape: Any) -> list[Expected]:
    """Losses and gradients of whole models; each rank computes some of them and has all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine: list[Expected] = []
    for kind, config in kinds[rank::world]:
        model = model_of(kind, **shape, **config)
        anatomy.probe(model)
        results = [single(model, batch) for batch in batches]
        mine.append([(float(loss), gradients) for loss, gradients in results])
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, (mine, anatomy._known))
    for _, known in everywhere:
        # A probe takes as long as a few steps, and finds the same on every rank.
        anatomy._known.update(known)
    return [everywhere[number % world][0][number // world] for number in range(len(kinds))]


def gradients_between(results: Expected, shares: int) -> dict[str, Tensor]:
    """The mean of the gradients of the first ``shares`` batches, as data-parallel ranks take it."""
    return {name: sum(g[name] for _, g in results[:shares]) / shares for name in results[0][1]}  # type: ignore[misc]
