"""Linear layers stored in 4 or 8 bits by bitsandbytes, and what keeps them from being spoilt."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_swift.adapters.settings import AdapterSettings

__all__ = ["dequantised_weight", "guard_packing", "is_quantised", "quantised_layers"]


def guard_packing(module: nn.Module) -> int:
    """Keep every 4-bit layer below ``module`` from rewriting its weight; return how many there are.

    On CPUs with AVX512-BF16, bitsandbytes packs the weight anew, in place, in the first forward pass of an
    evaluation, and training after that is silently wrong. To be called for every model that may hold such layers,
    before its first forward pass, whoever made them. Imports bitsandbytes only if someone has.
    """
    raise NotImplementedError


def quantised_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Every 4-bit and 8-bit layer of bitsandbytes below ``module``, by name."""
    raise NotImplementedError


def is_quantised(parameter: Tensor) -> bool:
    """Whether ``parameter`` is a weight in the form of bitsandbytes (packed, of another shape than the matrix)."""
    raise NotImplementedError


def dequantised_weight(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    """The matrix ``[out, in]`` that a 4-bit or 8-bit layer computes with; changes nothing in the layer."""
    raise NotImplementedError
