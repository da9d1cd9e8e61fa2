"""Gradient compression for DDP: torch's own communication hooks, made to hold on every backend and for every scale.

Torch refuses to register its bfloat16 hook by name wherever NCCL is missing, though gloo sums bfloat16 as well; and
its float16 hook turns a gradient above 65504 into infinity. The hooks here call those of torch and mend that.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_swift.errors import ConfigurationError

__all__ = ["Compression", "CompressionSettings", "register_compression"]

Compression = Literal["bf16", "fp16", "powersgd"]

# Below 2**15 no float16 sum of values that were divided by the number of ranks reaches infinity (at 2**16).
_HEADROOM = 15
# The largest power of two by which a gradient is scaled; a bucket that needs more holds nothing but underflow.
_MOST = 100


@dataclass(frozen=True)
class CompressionSettings:
    """How gradients are made smaller before ranks exchange them.

    Args:
        method: One of ``"bf16"``, ``"fp16"`` and ``"powersgd"``, or None.
        rank: Rank of the matrices that PowerSGD sends instead of a gradient.
        start: Number of optimizer steps before PowerSGD begins.

    Raises:
        ConfigurationError: A value that is not allowed.
    """

    method: Compression | None = None
    rank: int = 4
    start: int = 100

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in get_args(Compression):
            raise ConfigurationError(
                f"compression={self.method!r} is not one of {', '.join(get_args(Compression))}.", where="compression"
            )
        if self.rank < 1:
            raise ConfigurationError(f"powersgd_rank={self.rank!r} must be 1 or more.", where="compression")
        if self.start < 2:
            raise ConfigurationError(
                f"powersgd_start={self.start!r} must be 2 or more: DDP forms its buckets anew after the first step, "
                "and PowerSGD remembers them.",
                where="compression",
            )

    def __str__(self) -> str:
        return f"PowerSGD of rank {self.rank} from step {self.start}" if self.method == "powersgd" else str(self.method)


def register_compression(
    model: DistributedDataParallel, settings: CompressionSettings, group: dist.ProcessGroup | None = None
) -> PowerSGDState | None:
    """Have ``model`` exchange compressed gradients; return PowerSGD's state, which holds its error feedback.

    Raises:
        ConfigurationError: PowerSGD on CPU ranks of a machine with visible GPUs, which torch's hook cannot do.
    """
    if settings.method == "powersgd":
        _refuse_hidden_device(model)
        state = PowerSGDState(
            group, matrix_approximation_rank=settings.rank, start_powerSGD_iter=settings.start, use_error_feedback=True
        )
        model.register_comm_hook(state, powerSGD_hook)
        return state
    if settings.method is not None:
        model.register_comm_hook(group, _bf16_hook if settings.method == "bf16" else _fp16_hook)
    return None


def _bf16_hook(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    return bf16_compress_hook(group, bucket)


def _fp16_hook(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Torch's hook on gradients that are scaled by one power of two on all ranks, so that scaling rounds nothing."""
    scale = _common_scale(bucket.buffer(), group)
    bucket.buffer().mul_(scale)

    def unscale(future: Future[Tensor]) -> Tensor:
        if scale.is_cuda:
            # This runs on a stream of its own, and the memory of the scale belongs to another.
            scale.record_stream(torch.cuda.current_stream(scale.device))
        return future.value().div_(scale)

    return fp16_compress_hook(group, bucket).then(unscale)


def _common_scale(gradient: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The power of two that brings the largest element on any rank just below ``2**_HEADROOM``, as a scalar."""
    largest = torch.linalg.vector_norm(gradient, ord=float("inf")).float()
    # Not a number would make the maximum depend on the order of the ranks.
    most = torch.finfo(torch.float32).max
    largest = torch.nan_to_num(largest, nan=most, posinf=most)
    # Waited for, not chained: a collective that a callback starts has no order that is the same on all ranks.
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    exponent = torch.frexp(largest).exponent
    return torch.ldexp(torch.ones_like(largest), (_HEADROOM - exponent).clamp(max=_MOST)).to(gradient.dtype)


def _refuse_hidden_device(model: DistributedDataParallel) -> None:
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu and torch.cuda.is_available():
        raise ConfigurationError(
            "torch's PowerSGD hook synchronises a GPU if there is one, and fails for gradients on the CPU.",
            where='compression="powersgd"',
            fix='Hide the GPUs from this run with CUDA_VISIBLE_DEVICES="".',
        )
