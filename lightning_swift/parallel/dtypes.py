"""Precision as dtypes: what parameters are kept in, what is computed in, what gradients are reduced in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from lightning_swift.errors import ConfigurationError, ModelError

__all__ = ["PrecisionName", "PrecisionPolicy", "ReduceName", "cast_parameters", "check_masters"]

PrecisionName = Literal["bf16-mixed", "bf16-true", "32-true"]
ReduceName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """A precision and the dtypes it stands for.

    Args:
        name: ``"bf16-mixed"`` computes in bfloat16 from float32 master weights, with float32 moments; ``"bf16-true"``
            keeps weights and moments in bfloat16 too; ``"32-true"`` does everything in float32.
        reduce: Dtype in which gradients are summed over ranks and, without synchronisation, over micro-batches.

    Raises:
        ConfigurationError: A value that is not allowed, or a reduction coarser than the computation.
    """

    name: PrecisionName = "bf16-mixed"
    reduce: ReduceName = "float32"

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("precision", self.name, get_args(PrecisionName)),
            ("reduce_dtype", self.reduce, get_args(ReduceName)),
        ):
            if value not in allowed:
                raise ConfigurationError(f"{option}={value!r} is not one of {', '.join(allowed)}.", where="precision")
        if self.name == "32-true" and self.reduce != "float32":
            raise ConfigurationError(
                f"precision={self.name!r} and reduce_dtype={self.reduce!r} contradict each other.",
                where="precision",
                fix='Use reduce_dtype="float32", or a bf16 precision.',
            )

    @property
    def master_dtype(self) -> torch.dtype:
        """What trainable parameters, and so their moments, are kept in."""
        return torch.bfloat16 if self.name == "bf16-true" else torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        """What gathered parameters and the floating-point inputs of the model are cast to."""
        return torch.float32 if self.name == "32-true" else torch.bfloat16

    @property
    def reduce_dtype(self) -> torch.dtype:
        """What gradients are summed over ranks in."""
        return torch.float32 if self.reduce == "float32" else torch.bfloat16

    def __str__(self) -> str:
        compute, master, reduce = (
            str(dtype).removeprefix("torch.") for dtype in (self.compute_dtype, self.master_dtype, self.reduce_dtype)
        )
        return f"{self.name} (compute {compute}, master weights and moments {master}, gradients reduced in {reduce})"


def cast_parameters(model: nn.Module, policy: PrecisionPolicy) -> int:
    """Bring the parameters of ``model`` to the dtype they are to be kept in; return how many changed.

    Frozen parameters keep theirs, which saves memory and loses nothing, except under ``"bf16-true"``. Buffers are
    never cast: rotary tables and running statistics need their precision.
    """
    changed = 0
    for parameter in model.parameters():
        affected = parameter.requires_grad or policy.name == "bf16-true"
        if affected and parameter.is_floating_point() and parameter.dtype != policy.master_dtype:
            parameter.data = parameter.data.to(policy.master_dtype)
            changed += 1
    return changed


def check_masters(model: nn.Module, policy: PrecisionPolicy) -> None:
    """Refuse trainable parameters that are not kept in the dtype that the precision promises.

    Raises:
        ModelError: A trainable parameter has another dtype.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != policy.master_dtype:
            raise ModelError(
                f"the parameter is {parameter.dtype}, but precision={policy.name!r} keeps trainable parameters in "
                f"{policy.master_dtype}.",
                where=name,
                fix="Do not change dtypes after the strategy has set the model up.",
            )
