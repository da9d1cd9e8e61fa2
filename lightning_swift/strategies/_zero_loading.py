"""Builds and fills models under ZeRO so that no rank holds more of them than it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_swift.adapters.quantise import is_quantised, without_second_copies
from lightning_swift.models.lazy import load_lazy_weights

if TYPE_CHECKING:
    from lightning_swift.strategies._zero_config import DeepSpeedConfig

__all__ = ["known_to_transformers", "load_and_place", "loading_config"]


def loading_config(config: DeepSpeedConfig) -> DeepSpeedConfig:
    """The configuration while the model is being built, when sizes that follow from the model are not known yet."""
    zero = {key: value for key, value in config["zero_optimization"].items() if value != "auto"}
    return {**config, "zero_optimization": zero}


@contextmanager
def known_to_transformers(config: DeepSpeedConfig) -> Iterator[None]:
    """While active, transformers and peft know that this process runs ZeRO with ``config``.

    ``from_pretrained`` then partitions each parameter as it makes it (without, it fails on empty shapes), ``generate``
    keeps ranks together, and peft gathers what it reads. Outside, ``from_pretrained`` is an ordinary one: an export
    that one rank verifies alone must not wait for the others.
    """
    from transformers.integrations import deepspeed as integration

    # transformers holds a weak reference only.
    known: Any = integration.HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        integration.unset_hf_deepspeed_config()
        del known


def load_and_place(module: nn.Module, config: DeepSpeedConfig, *, device: torch.device, dtype: torch.dtype) -> None:
    """Fill lazy models and bring every parameter to where ZeRO keeps it, one at a time.

    Floating-point parameters are cast to ``dtype`` (bytes of packed weights are not), and under stage 3 each is
    partitioned before the next is touched: DeepSpeed itself casts and moves the whole model first, and leaves alone
    what was added to a model that is partitioned already (adapters, a head of the user's own). Buffers keep their
    dtype, and get the first rank's values as parameters do.
    """
    partition = _Partition(config, dtype) if config["zero_optimization"]["stage"] == 3 else None

    def place(parameter: nn.Parameter) -> None:
        if hasattr(parameter, "ds_id"):
            return
        if parameter.is_floating_point() and not is_quantised(parameter) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
        # What DoRA derives from a packed weight needs it whole.
        if partition is not None and not is_quantised(parameter):
            partition(parameter)

    load_lazy_weights(module, device=device, place=place)
    if partition is not None:
        without_second_copies(module)
    for parameter in module.parameters():
        place(parameter)
        if partition is not None and not hasattr(parameter, "ds_id"):
            partition(parameter)
    _agree_on_buffers(module, device)


class _Partition:
    """Cuts one parameter at a time over all ranks, with the values of the first one."""

    def __init__(self, config: DeepSpeedConfig, dtype: torch.dtype) -> None:
        offload = config["zero_optimization"].get("offload_param", {})
        self._dtype = dtype
        self._remote = offload.get("device")
        self._pinned = bool(offload.get("pin_memory"))

    def __call__(self, parameter: nn.Parameter) -> None:
        import deepspeed

        carrier = nn.Module()
        carrier.register_parameter("parameter", parameter)
        deepspeed.zero.Init(
            module=carrier,
            # DeepSpeed's replacement of torch's linear function belongs to the engine, which knows the configuration.
            mem_efficient_linear=False,
            remote_device=self._remote,
            pin_memory=self._pinned,
            dtype=self._dtype,
        )


@torch.no_grad()
def _agree_on_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is None:
                continue
            part._buffers[name] = moved = buffer.to(device)
            if name not in part._non_persistent_buffers_set and moved.numel() and dist.is_initialized():
                # As bytes, because gloo does not know every dtype.
                dist.broadcast(moved.contiguous().view(-1).view(torch.uint8), src=0)
