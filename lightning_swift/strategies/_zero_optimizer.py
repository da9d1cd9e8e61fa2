"""The user's optimizer under ZeRO: what DeepSpeed gets in its place, and gradients divided before it steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_swift.errors import ConfigurationError

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.types import LRSchedulerConfig

__all__ = [
    "check_elementwise",
    "check_single",
    "gradients_times",
    "offloaded_adam",
    "use_fused_kernels",
    "users_optimizers",
]

# Look at whole parameters or call a closure again; in lower case.
_NOT_ELEMENTWISE = {"adafactor", "lamb", "fusedlamb", "lars", "lbfgs", "muon", "shampoo", "soap"}
# Options of torch's Adam that DeepSpeed's has no counterpart for.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable")


def users_optimizers(module: pl.LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """What ``configure_optimizers`` returns, asked while partitioned parameters show their whole shapes."""
    with _whole_shapes(module):
        return _init_optimizers_and_lr_schedulers(module)


@contextmanager
def _whole_shapes(module: nn.Module) -> Iterator[None]:
    """While active, a partitioned parameter has the shape that it has elsewhere, without the memory.

    Its own is ``[0]``: grouping parameters by ``p.ndim``, as is usual for weight decay, would silently make one group.
    """
    parted = [p for p in module.parameters() if p.requires_grad and p.numel() == 0 and hasattr(p, "ds_shape")]
    kept = [p.data for p in parted]
    for parameter in parted:
        parameter.data = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.ds_shape)
    try:
        yield
    finally:
        for parameter, data in zip(parted, kept, strict=True):
            parameter.data = data


def offloaded_adam(optimizer: Optimizer, *, bf16_states: bool) -> Optimizer:
    """DeepSpeed's vectorised Adam for host memory in place of torch's, with the same groups; others as they are.

    The groups are the same objects: schedulers and callbacks that hold the user's optimizer go on acting on it.
    """
    groups = optimizer.param_groups
    if type(optimizer) not in (Adam, AdamW) or not _has_counterpart(groups):
        return optimizer
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    replaced: Optimizer = DeepSpeedCPUAdam(
        [{**group} for group in groups],
        adamw_mode=groups[0]["decoupled_weight_decay"],
        fp32_optimizer_states=not bf16_states,
    )
    for group, full in zip(groups, replaced.param_groups, strict=True):
        for key, value in full.items():
            group.setdefault(key, value)
    replaced.param_groups = groups
    # torch's schedulers warn unless the optimizer that they were built with has made a step.
    replaced.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return replaced


def _has_counterpart(groups: list[dict[str, Any]]) -> bool:
    """Whether DeepSpeed's Adam does the same, which adds decay in one way for all groups."""
    missing = any(group.get(option) for group in groups for option in _UNSUPPORTED)
    return not missing and len({group["decoupled_weight_decay"] for group in groups}) == 1


def use_fused_kernels(optimizer: Optimizer) -> None:
    """One kernel for all of a group's elements, for torch's Adam and AdamW whose user has not chosen another way."""
    if type(optimizer) not in (Adam, AdamW):
        return
    for group in optimizer.param_groups:
        chosen = any(group.get(key) is not None for key in ("foreach", "fused"))
        if not chosen and not group.get("differentiable") and not group.get("capturable"):
            group["fused"] = True


@contextmanager
def gradients_times(engine: Any, factor: float) -> Iterator[None]:
    """While active, ``engine.step()`` sees every gradient multiplied by ``factor``, clipping included.

    ZeRO's own division by a loss scale does it, so gradients need no pass of their own and may lie anywhere.
    """
    optimizer = engine.optimizer
    if factor == 1.0:
        yield
    elif hasattr(optimizer, "loss_scaler"):
        before = optimizer.loss_scale
        optimizer.loss_scale = before / factor
        try:
            yield
        finally:
            optimizer.loss_scale = before
    else:
        # The optimizer that DeepSpeed takes for stage 1 in BF16 has no scale, and keeps whole FP32 gradients.
        torch._foreach_mul_(optimizer.fp32_groups_gradients_flat, factor)
        yield


def check_single(optimizers: list[Optimizer]) -> Optimizer:
    """The one optimizer.

    Raises:
        ConfigurationError: There is none, or more than one.
    """
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"DeepSpeed drives one optimizer, and there are {len(optimizers)}.",
            where="configure_optimizers",
            fix="Return one optimizer; it may have several parameter groups.",
        )
    return optimizers[0]


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would step otherwise on the flat vectors that ZeRO makes of all parameters of a group.

    Raises:
        ConfigurationError: Its update of an element hangs on the others of its parameter, or its states are in blocks.
    """
    name = type(optimizer).__name__
    if _NOT_ELEMENTWISE & {kind.__name__.lower() for kind in type(optimizer).__mro__}:
        raise ConfigurationError(
            f"{name} looks at whole parameters, and ZeRO shows it parts of one long vector: it would train otherwise "
            "without a word.",
            where="configure_optimizers",
            fix="Use an optimizer that treats every element alike (AdamW, SGD, ...), or DDPBF16Strategy.",
        )
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8:
        raise ConfigurationError(
            f"the 8-bit states of {name} are in blocks over one long vector and could not be saved by parameter.",
            where="configure_optimizers",
            fix='Use AdamW, whose state ZeRO cuts up (offload_optimizer="cpu" takes it off the device), or '
            "DDPBF16Strategy.",
        )
