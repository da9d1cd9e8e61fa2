"""Two stages of two cut ranks each, and with shards besides, against the whole model in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.tensor import (
    TensorParallelSettings,
    apply_tensor_parallel,
    partial_parameters,
    sum_partial_gradients,
    tensor_parallel_context,
)
from tests.harness.ranks import ranks
from tests.pipeline.references import LOSS, batch_of, check_gradients, check_step, model_of, pipelined, single

KINDS: list[tuple[str, dict[str, Any]]] = [
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
ALL = TensorParallelSettings(sequence_parallel=True, loss_parallel=True)


def cut_pipeline(model: Any, name: Any, mesh: DeviceMesh, settings: TensorParallelSettings) -> PipelinedModel:
    """Split, cut and, where the mesh has shards, shard; the order of transforms of the strategy."""
    tp = mesh["tp"]
    pipeline = pipelined(
        model,
        name,
        4,
        group=mesh.get_group("pp"),
        length_multiple=tp.size() if settings.sequence_parallel else 1,
        step_context=partial(tensor_parallel_context, settings),
    )
    reports = []
    stages: list[Any] = list(pipeline.stages)
    for stage in stages:
        reports.append(apply_tensor_parallel(stage.model, tp, settings, first=stage.first, last=stage.last))
        if "dp_shard" in (mesh.mesh_dim_names or ()):
            for layer in stage.layers:
                fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=False)
            fully_shard(stage, mesh=mesh["dp_shard"], reshard_after_forward=False)
    found = set[torch.nn.Parameter]()
    for stage, report in zip(stages, reports, strict=True):
        found |= partial_parameters(stage.model, report)
    pipeline.gradient_fixes.append(lambda pairs: sum_partial_gradients(pairs, found, mesh.get_group("tp")))
    return pipeline


def check_kinds(settings: TensorParallelSettings, name: Any, length: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    batch = batch_of(8, length)
    for kind, config in KINDS:
        model = cut_pipeline(model_of(kind, **config), name, mesh, settings)
        check_step(model, model_of(kind, **config), batch, what=f"{kind} {name}")


@ranks(4, deadline=90)
def test_every_architecture_cut_in_stages() -> None:
    check_kinds(TensorParallelSettings(), "1F1B", 12)


@ranks(4, deadline=90)
def test_every_architecture_with_sequence_and_loss_parallelism_at_an_odd_length() -> None:
    check_kinds(ALL, "1F1B", 13)


@ranks(4, deadline=60)
def test_schedules_with_several_stages_on_a_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for name in ("Interleaved1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"):
        for kind in ("llama", "qwen3"):
            model = cut_pipeline(model_of(kind, tie=True), name, mesh, ALL)
            check_step(model, model_of(kind, tie=True), batch_of(8, 12), what=f"{kind} {name}")


@ranks(8, deadline=90)
def test_stages_of_cut_and_sharded_layers() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    rank = mesh.get_local_rank("dp_shard")
    batches = [batch_of(8, 12, seed=seed) for seed in range(2)]
    for kind, config in (("llama", {"tie": True}), ("qwen3", {}), ("mixtral", {})):
        results = [single(model_of(kind, **config), batch) for batch in batches]
        expected = {name: (results[0][1][name] + results[1][1][name]) / 2 for name in results[0][1]}
        model = cut_pipeline(model_of(kind, **config), "1F1B", mesh, ALL)
        loss = model(**batches[rank]).loss
        loss.backward()
        assert abs(float(loss.detach() - results[rank][0])) < LOSS
        check_gradients(model, expected, what=kind)
