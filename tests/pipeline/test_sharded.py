"""Pipelines whose stages are sharded by FSDP2 over a data-parallel axis: two stages, two shards of each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from lightning_swift.parallel._pipeline_gradients import taken_gradients
from lightning_swift.parallel.pipeline import PipelinedModel
from tests.harness.ranks import ranks
from tests.pipeline.references import LOSS, Batch, batch_of, check_gradients, model_of, pipelined, single


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def _sharded(model: Any, name: Any, mesh: DeviceMesh, **kwargs: Any) -> PipelinedModel:
    policy = kwargs.pop("policy", MixedPrecisionPolicy())
    pipeline = pipelined(model, name, 4, group=mesh.get_group("pp"), **kwargs)
    for stage in pipeline.stages:
        for layer in stage.layers:
            fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=False, mp_policy=policy)
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False, mp_policy=policy)
    return pipeline


def _expected(model: Any, batches: list[Batch]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Loss of each data-parallel rank, and the mean of the gradients, as FSDP takes it."""
    results = [single(model, batch) for batch in batches]
    gradients = {name: sum(g[name] for _, g in results) / len(results) for name in results[0][1]}
    return [float(loss) for loss, _ in results], gradients


@ranks(4)
def test_sharded_stages_equal_one_process_also_after_evaluation_and_when_accumulating() -> None:
    mesh = _mesh()
    rank = mesh.get_local_rank("dp")
    batches = [batch_of(8, 16, seed=seed) for seed in range(2)]
    losses, gradients = _expected(model_of(tie=True), batches)
    for name in ("1F1B", "ZBVZeroBubble"):
        model = _sharded(model_of(tie=True), name, mesh)
        for _ in range(2):
            # An evaluation before each step: Lightning's sanity check comes before the first one.
            with torch.no_grad():
                evaluated = model(**batches[rank]).loss
            assert all(isinstance(p, DTensor) for p in model.parameters()), "left gathered"
            assert {id(stage) for stage in model.stages} <= {id(part) for part in model.modules()}
            loss = model(**batches[rank]).loss
            loss.backward()
            assert abs(float(loss.detach()) - losses[rank]) < LOSS
            assert abs(float(evaluated) - losses[rank]) < LOSS
        check_gradients(model, gradients, scale=2.0, what=name)


@ranks(4)
def test_parameters_that_something_left_gathered_are_trained_all_the_same() -> None:
    mesh = _mesh()
    rank = mesh.get_local_rank("dp")
    batches = [batch_of(8, 16, seed=seed) for seed in range(2)]
    _, gradients = _expected(model_of(), batches)
    model = _sharded(model_of(), "1F1B", mesh)
    for _ in range(2):
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.unshard()
        # Scaled, which gradients that go past the loss would not notice.
        (3 * model(**batches[rank]).loss).backward()
    check_gradients(model, gradients, scale=6.0)


@ranks(2)
def test_gradients_come_in_the_layout_of_their_parameters() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = torch.nn.Embedding(8, 4)
    expected = torch.autograd.grad(plain(torch.tensor([1, 7])).square().sum(), plain.weight)[0]
    embedding = parallelize_module(plain, mesh, RowwiseParallel(input_layouts=Replicate()))
    with taken_gradients(list(embedding.parameters())) as collected:
        embedding(torch.tensor([1, 7])).square().sum().backward()
        # What autograd leaves here, for an embedding that is cut along its vocabulary.
        assert embedding.weight.grad.placements != embedding.weight.placements
    ((parameter, gradient),) = collected.pairs
    assert parameter is embedding.weight
    assert gradient.placements == parameter.placements
    assert torch.equal(gradient.full_tensor(), expected)
    assert embedding.weight.grad is None


@ranks(4)
def test_bf16_stages_send_bf16_and_keep_fp32_gradients() -> None:
    mesh = _mesh()
    rank = mesh.get_local_rank("dp")
    batches = [batch_of(8, 16, seed=seed) for seed in range(2)]
    losses, gradients = _expected(model_of(), batches)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _sharded(model_of(), "1F1B", mesh, policy=policy, activation_dtype=torch.bfloat16)
    loss = model(**batches[rank]).loss
    loss.backward()
    assert loss.dtype == torch.float32
    # BF16 has 8 bits: products round by 2**-9 each, and a loss of 5.5 by about a hundredth of that many.
    assert abs(float(loss.detach()) - losses[rank]) < 2e-3
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    check_gradients(model, gradients, bound=5e-2)
    with torch.no_grad():
        assert abs(float(model(**batches[rank]).loss) - losses[rank]) < 2e-3


@ranks(4)
def test_stages_without_trainable_parameters() -> None:
    mesh = _mesh()
    rank = mesh.get_local_rank("dp")
    batches = [batch_of(8, 16, seed=seed) for seed in range(2)]

    def frozen(first: bool) -> Any:
        model = model_of()
        for name, parameter in model.named_parameters():
            at_start = "embed_tokens" in name or ".layers.0." in name or ".layers.1." in name
            parameter.requires_grad_(at_start != first)
        return model

    for first in (True, False):
        _, gradients = _expected(frozen(first), batches)
        for name in ("GPipe", "1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"):
            model = _sharded(frozen(first), name, mesh)
            model(**batches[rank]).loss.backward()
            check_gradients(model, gradients, what=f"{name} first frozen: {first}")
            assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    dist.barrier()
