"""DoRA where weights are packed, partitioned or not read yet: its magnitudes, and how it looks at a base weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.adapters.quantise import dequantised_weight, quantised_layers

__all__ = ["keep_weights_in_place", "magnitudes", "not_copied", "row_norms"]


def keep_weights_in_place(module: nn.Module) -> int:
    """Have DoRA read the quantised layers below ``module`` without assigning their weights anew; return how many.

    peft assigns ``layer.weight`` again after each look at a quantised weight on the CPU, and what an engine has noted
    on the parameter (ZeRO-3's partitions) is lost with it. Layers with an attribute ``W_q`` it asks to
    ``dequantize()`` themselves, so these get both, on the instance. Before the adapters are made: a layer without
    weights yet then gives an empty matrix. Calling it again changes nothing.
    """
    layers = quantised_layers(module).values()
    for layer in layers:
        # Only its presence counts, and where it lies while adapters are made.
        layer.W_q = torch.empty(0, device=layer.weight.device)  # type: ignore[arg-type]
        layer.dequantize = MethodType(_dequantise, layer)  # type: ignore[assignment]
    return len(layers)


@contextmanager
def not_copied(module: nn.Module) -> Iterator[None]:
    """While active, a copy of a quantised layer below ``module`` is the layer itself.

    peft copies each 4-bit layer only to read its weight, and a weight that has not been read yet cannot be copied.
    """
    layers = list(quantised_layers(module).values())
    for layer in layers:
        layer.__deepcopy__ = MethodType(lambda self, memo: self, layer)  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["__deepcopy__"]


def magnitudes(model: nn.Module) -> Iterator[tuple[str, str, bool]]:
    """Name of each DoRA magnitude below ``model``, name of the adapted layer, and whether its weight is transposed."""
    for prefix, layer in model.named_modules():
        for name, part in getattr(layer, "lora_magnitude_vector", {}).items():
            yield f"{prefix}.lora_magnitude_vector.{name}.weight", prefix, bool(part.fan_in_fan_out)


def row_norms(weight: Tensor, *, transposed: bool) -> Tensor:
    """First magnitudes for whole rows of ``weight`` (columns if ``transposed``), in its dtype, as peft has them."""
    norms: Tensor = torch.linalg.norm(weight.T if transposed else weight, dim=1)
    return norms.to(weight.dtype)


def _dequantise(layer: Any) -> Tensor:
    # From the layer, not from its weight: where a look gathers a partitioned weight, one look is enough.
    state = layer.__dict__.get("quant_state")
    dtype: torch.dtype | None = getattr(state, "dtype", None) or getattr(layer, "compute_dtype", None)
    return dequantised_weight(layer, dtype or torch.float32)
