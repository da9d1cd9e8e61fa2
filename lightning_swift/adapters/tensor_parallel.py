"""LoRA layers of peft over tensor-parallel ranks: the small matrices follow the layer that they adapt.

A layer cut by columns has A whole and B cut by columns; a layer cut by rows has A cut by rows and B whole. The rank-r
activation between them is whole on every rank. Dropout in front of A draws the same mask on all ranks where its input
is the same on them, and different masks where each rank has its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

from lightning_swift.errors import ModelError
from lightning_swift.parallel.plans import Cut, Style

__all__ = ["RankedDropout", "check_lora", "cut_lora", "is_lora"]


def is_lora(module: nn.Module) -> bool:
    """Whether ``module`` is a layer that peft has given LoRA matrices."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def check_lora(name: str, module: nn.Module) -> None:
    """Refuse adapters of a cut layer that could not be cut with it.

    Raises:
        ModelError: The layer has DoRA magnitudes, or an adapter other than plain LoRA.
    """
    if hasattr(module, "modules_to_save"):
        raise ModelError(
            "a layer trained as a whole beside LoRA (modules_to_save) cannot be cut.",
            where=name,
            fix="Leave it out of modules_to_save, or take it out of the plan with tp_plan={'...': 'replicate'}.",
        )
    if not hasattr(module, "base_layer"):
        return
    if getattr(module, "lora_magnitude_vector", None):
        raise ModelError(
            "DoRA needs the norm of whole columns and is not supported under tensor parallelism.",
            where=name,
            fix="Use lora with dora=False, or tensor_parallel_size=1.",
        )
    if not is_lora(module) or getattr(module, "lora_variant", None):
        raise ModelError(
            f"the adapter {type(module).__name__} is not supported under tensor parallelism.",
            where=name,
            fix="Use LoRA with or without rslora, or tensor_parallel_size=1.",
        )


def cut_lora(module: Any, style: Style, mesh: DeviceMesh, outside: Placement) -> None:
    """Cut the LoRA matrices of one layer, all adapters of it, in place; the base layer has been cut already.

    Args:
        module: peft's LoRA layer.
        style: How its base layer is cut.
        mesh: One-dimensional mesh of the tensor-parallel ranks.
        outside: Placement of the activations between the blocks.
    """
    for adapter in module.lora_A:
        first, second = module.lora_A[adapter], module.lora_B[adapter]
        if style.cut is Cut.COLUMNS:
            _replicate(first, mesh, outside)
            output = Replicate() if style.whole else Shard(-1)
            parallelize_module(second, mesh, ColwiseParallel(output_layouts=output), src_data_rank=None)
        else:
            rows = RowwiseParallel(input_layouts=Replicate() if style.whole else Shard(-1), output_layouts=outside)
            parallelize_module(first, mesh, rows, src_data_rank=None)
        dropout = module.lora_dropout[adapter]
        if isinstance(dropout, nn.Dropout):
            split = style.cut is Cut.ROWS and not style.whole
            ranked = RankedDropout(dropout.p, rank=mesh.get_local_rank() if split else None)
            module.lora_dropout[adapter] = ranked.train(dropout.training)


def _replicate(linear: nn.Module, mesh: DeviceMesh, outside: Placement) -> None:
    for name, parameter in list(linear.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    linear.register_forward_pre_hook(_Spread(mesh, outside))


class _Spread:
    """Makes the input of the first matrix a replicated ``DTensor`` where the block has not done so."""

    def __init__(self, mesh: DeviceMesh, outside: Placement) -> None:
        self.mesh, self.outside = mesh, outside

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(args[0], DTensor):
            return args
        spread = DTensor.from_local(args[0], self.mesh, [self.outside], run_check=False)
        return (spread.redistribute(placements=[Replicate()]), *args[1:])


class RankedDropout(nn.Module):
    """Dropout whose mask hangs on the default generator and, if given, on the rank.

    The default generators of tensor-parallel ranks run in step, so ``rank=None`` draws the same mask on all of them.
    Recomputation under activation checkpointing restores the default generator and so draws the same mask again.

    Args:
        p: Share of the elements that become zero.
        rank: Index of the rank where each rank has its own part of the input.
    """

    def __init__(self, p: float, *, rank: int | None) -> None:
        super().__init__()
        self.p, self.rank = p, rank

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Zero a share of the elements of ``x`` and scale the others, while training."""
        if not self.training or self.p == 0.0:
            return x
        # Random operators on a DTensor would make torch synchronise the generators of all ranks.
        local = x.to_local() if isinstance(x, DTensor) else x
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) + (
            0 if self.rank is None else self.rank + 1
        )
        generator = torch.Generator(local.device).manual_seed(seed)
        kept = torch.empty_like(local, requires_grad=False).bernoulli_(1.0 - self.p, generator=generator)
        dropped = local * kept.div_(1.0 - self.p)
        if not isinstance(x, DTensor):
            return dropped
        return DTensor.from_local(dropped, x.device_mesh, x.placements, run_check=False)
