"""First values of LoRA adapters, the same on every rank, in every strategy and for weights read early or late.

peft draws them from the global generator when it makes the layers, so that they would depend on whatever was drawn
before; and it leaves them empty where the weights beside them lie on the meta device.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.errors import ModelError

__all__ = ["initial_adapter_values", "initialise_adapters"]

_CONTAINERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def initial_adapter_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and whole float32 values of the LoRA matrices below ``model``, initialised by peft's own method.

    The values depend on the layer's name and on the seed of ``seed_everything`` only, so that all ranks and all
    ways of sharding get the same ones, one layer at a time.

    Args:
        model: The Hugging Face model inside its peft wrapper: names are relative to it.

    Raises:
        ModelError: The adapter's initialisation needs the weights that have not been read (PiSSA, OLoRA, ...).
    """
    settings = getattr(model, "peft_config", {})
    for prefix, layer in model.named_modules():
        if hasattr(layer, "reset_lora_parameters"):
            for name, value in _values(layer, prefix, settings):
                yield f"{prefix}.{name}", value


@torch.no_grad()
def initialise_adapters(model: nn.Module) -> None:
    """Give the LoRA matrices below ``model`` their first values, except those on the meta device."""
    parameters = dict(model.named_parameters())
    for name, value in initial_adapter_values(model):
        if not parameters[name].is_meta:
            parameters[name].copy_(value)


def _values(layer: Any, prefix: str, settings: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    stand_in = copy.copy(layer)
    stand_in.__dict__["_modules"] = dict(layer._modules)
    for kind in _CONTAINERS:
        if kind in layer._modules:
            stand_in._modules[kind] = _materialised(layer._modules[kind])
    seed = zlib.crc32(f"{os.environ.get('PL_GLOBAL_SEED', '0')} {prefix}".encode())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for container in (stand_in._modules.get(kind) for kind in _CONTAINERS):
            for part in container.children() if container is not None else ():
                part.reset_parameters()
        for adapter in layer.r:
            stand_in.reset_lora_parameters(adapter, _initialisation(settings[adapter], prefix))
    for kind in _CONTAINERS:
        if kind in layer._modules:
            for name, value in stand_in._modules[kind].named_parameters(prefix=kind):
                yield name, value.detach()


def _materialised(container: Any) -> Any:
    """A copy of a container of adapter parts that has whole, real parameters instead of empty or sharded ones."""
    if isinstance(container, nn.ParameterDict):
        return nn.ParameterDict({key: _real(parameter) for key, parameter in container.items()})
    parts = nn.ModuleDict()
    for key, part in container.items():
        parts[key] = copy.copy(part)
        parts[key].__dict__["_parameters"] = {
            name: None if parameter is None else _real(parameter) for name, parameter in part._parameters.items()
        }
    return parts


def _real(parameter: nn.Parameter) -> nn.Parameter:
    # Drawn in float32 whatever they are kept in: numbers drawn in bfloat16 are others.
    return nn.Parameter(torch.zeros(parameter.shape))


def _initialisation(settings: Any, prefix: str) -> bool | str:
    wanted: bool | str = settings.init_lora_weights
    if isinstance(wanted, str) and wanted.lower() != "gaussian":
        raise ModelError(
            f"init_lora_weights={wanted!r} needs the weights of the base model, which have not been read yet.",
            where=prefix,
            fix="Build the base model with from_pretrained, or use the default initialisation.",
        )
    return wanted
