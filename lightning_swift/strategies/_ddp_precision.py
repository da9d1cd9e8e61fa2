"""The precision plugin of DDP: autocast over float32 masters, or everything in one dtype."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_swift.parallel.dtypes import PrecisionName
from lightning_swift.strategies._precision import MeshPrecision

__all__ = ["DDPPrecision"]


class DDPPrecision(MeshPrecision):
    """Steps of ``"bf16-mixed"`` run under autocast; inputs of ``"bf16-true"`` are cast, as in Lightning.

    Args:
        precision: The strategy's precision.

    Attributes:
        device_type: What autocast is for; the strategy sets it as soon as it knows its device.
    """

    def __init__(self, precision: PrecisionName) -> None:
        super().__init__(precision)
        self.device_type = "cpu"

    @override
    @contextmanager
    def forward_context(self) -> Generator[None]:
        if self.precision != "bf16-mixed":
            yield
            return
        # Casts that a forward pass without gradients has cached would cut the graph of a later one (pytorch 65766).
        with torch.autocast(self.device_type, dtype=torch.bfloat16, cache_enabled=False):
            yield

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(data, dtype=Tensor, function=_to_bfloat16)


def _to_bfloat16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
