"""Mixture-of-experts layers over tensor-parallel ranks: each rank holds whole experts, a share of their number.

transformers keeps the experts of a layer in fused parameters of shape ``[experts, ...]``. They are cut along that
first dimension, so a slice of a checkpoint or of a Hugging Face folder is a run of whole experts. Every rank sees all
tokens, computes those routed to its own experts, and the outputs are summed. The router is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_swift.errors import ModelError

__all__ = ["check_experts", "cut_experts", "cut_parameter", "local_parameters"]


def check_experts(name: str, module: nn.Module, size: int) -> None:
    """Refuse fused experts that ``size`` ranks cannot share evenly, or that are laid out in another way.

    Raises:
        ModelError: ``size`` does not divide the number of experts, or a parameter has another first dimension.
    """
    count = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not parameters or not hasattr(module, "_is_expert_parallel"):
        raise ModelError(
            f"{type(module).__name__} is no layer of fused experts of transformers.",
            where=name,
            fix="Take it out of the plan with tp_plan={'...': 'replicate'}.",
        )
    if count % size or any(parameter.shape[0] != count for parameter in parameters):
        raise ModelError(
            f"{count} experts cannot be shared by {size} tensor-parallel ranks.",
            where=name,
            fix="Choose a tensor_parallel_size that divides the number of experts.",
        )


def cut_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dim: int = 0) -> None:
    """Make parameter ``name`` of ``module`` a ``DTensor`` cut along ``dim``. No communication."""
    parameter = module._parameters[name]
    if parameter is None:
        return
    cut = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def cut_experts(module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Give each rank its share of the fused experts of ``module``, in place.

    Args:
        module: The layer, called with tokens ``[n, hidden]``, expert numbers and weights ``[n, k]``.
        mesh: One-dimensional mesh of the tensor-parallel ranks.
        sequence: Whether each rank comes with its own tokens, rather than all ranks with the same.
    """
    for name, _ in list(module.named_parameters(recurse=False)):
        cut_parameter(module, name, mesh)
    # nn.Module.__setattr__ puts a callable that is no module into the instance's own dictionary.
    module.forward = _ExpertsForward(module, mesh, sequence=sequence)


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """While active, the ``DTensor`` parameters that lie on ``module`` itself are this rank's parts, as plain tensors.

    Gradients flow through. ``torch.func.functional_call`` would call the hooks of the module once more.
    """
    parameters: dict[str, Any] = module._parameters
    whole = {name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    parameters.update({name: parameter.to_local() for name, parameter in whole.items()})
    try:
        yield
    finally:
        parameters.update(whole)


class _ExpertsForward:
    """Shadows ``forward`` of a layer of fused experts, of which this rank has a share."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, *, sequence: bool) -> None:
        self.module, self.mesh = module, mesh
        self.outside = Shard(0) if sequence else Replicate()
        count: Any = module.num_experts
        self.count = count // mesh.size()
        # What transformers' own implementations look at: numbers beyond the last expert are skipped.
        module.num_experts = self.count
        module._is_expert_parallel = True  # type: ignore[assignment]

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        forward: Callable[..., Tensor] = type(self.module).forward.__get__(self.module)
        hidden, weights = self._everywhere(hidden), self._everywhere(weights)
        with torch.no_grad():
            chosen = self._everywhere(chosen) - self.mesh.get_local_rank() * self.count
        elsewhere = (chosen < 0) | (chosen >= self.count)
        with local_parameters(self.module):
            mine = forward(hidden, chosen.masked_fill(elsewhere, self.count), weights.masked_fill(elsewhere, 0.0))
        summed = DTensor.from_local(mine, self.mesh, [Partial()], run_check=False).redistribute(
            placements=[self.outside]
        )
        return summed.to_local()

    def _everywhere(self, value: Tensor) -> Tensor:
        """All ranks' tokens; the gradient of each rank is only the part of its experts."""
        spread = DTensor.from_local(value, self.mesh, [self.outside], run_check=False)
        return spread.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
