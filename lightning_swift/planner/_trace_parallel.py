"""Distributes a traced model with the package's own cutting and sharding, over ranks that do not exist."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

__all__ = [
    "cut",
    "distribute",
    "fake_mesh",
    "gather_around",
    "loss_context",
    "materialise",
    "reduce_gradients",
    "wait_with_gradients",
]

Request = Mapping[str, Any]


def fake_mesh(request: Request) -> Any:
    """The mesh of a request over a fake process group; None for one that runs on one rank without FSDP."""
    if not request["sharded"]:
        return None
    # Imported late: most traces need none of it, and it takes as long as they do.
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lightning_swift.parallel.mesh import MeshSizes, build_mesh

    sizes = MeshSizes(dp_replicate=request["replicate"], dp_shard=request["shard"], tp=request["tensor"])
    if dist.is_initialized():
        dist.destroy_process_group()
    world = sizes.data_parallel * sizes.tp
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    return build_mesh(sizes, "cpu")


class _Holder(nn.Module):
    """Stands for the LightningModule around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def cut(model: nn.Module, mesh: Any, request: Request) -> None:
    """Tensor parallelism, before checkpointing. The check by numbers is of no use here: nothing is computed."""
    if request["tensor"] == 1:
        return
    from lightning_swift.parallel.mesh import MeshAxis
    from lightning_swift.parallel.tensor import TensorParallelSettings, apply_tensor_parallel

    settings = TensorParallelSettings(
        sequence_parallel=request["sequence"], loss_parallel=request["loss_parallel"], self_check=False
    )
    stage = request["stage"]
    first, last = stage in ("whole", "first"), stage in ("whole", "last")
    apply_tensor_parallel(model, mesh[MeshAxis.TP], settings, first=first, last=last)


def distribute(model: nn.Module, mesh: Any, request: Request) -> None:
    """FSDP2, grouped as the strategies group it."""
    from lightning_swift.parallel.blocks import find_blocks
    from lightning_swift.parallel.dtypes import PrecisionPolicy
    from lightning_swift.parallel.sharding import ShardingSettings, shard

    blocks = [(f"model.{name}", block) for name, block in find_blocks(model)]
    settings = ShardingSettings(PrecisionPolicy(request["precision"]), reshard_after_forward=request["reshard"])
    shard(_Holder(model), mesh, settings, blocks)


def gather_around(model: Any, name: str) -> None:
    """Have FSDP2 treat a method that is called instead of ``forward`` like it."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(model, name)


def materialise(model: Any) -> None:
    """Storage for parameters and buffers that were made without."""
    tied = model.config.tie_word_embeddings
    model.to_empty(device="cpu")
    if tied:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def wait_with_gradients(model: Any) -> None:
    """As a pipeline schedule does for each micro-batch: gradients add up whole, and gathered weights stay."""
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)


def reduce_gradients(model: Any) -> None:
    """What torch's ``PipelineStage.perform_reduce_grad`` does after the last micro-batch."""
    from torch.distributed.fsdp import fully_shard

    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    root: Any = fully_shard.state(model)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root._root_post_backward_final_callback()


def loss_context(request: Request) -> AbstractContextManager[None]:
    """What forward and backward run in."""
    if not request["loss_parallel"]:
        return nullcontext()
    from lightning_swift.parallel.tensor import TensorParallelSettings, tensor_parallel_context

    return tensor_parallel_context(TensorParallelSettings(loss_parallel=True))
