"""In which sizes a step computes: bytes of weights and products, quantisation, adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Adapter", "Arithmetic", "Quantised"]

Quantised = Literal["none", "nf4", "int8"]


@dataclass(frozen=True)
class Adapter:
    """LoRA beside every linear layer of a block.

    Args:
        rank: Its r.
        size: Bytes per element in which adapters compute.
        dropout: Whether their input goes through dropout.
        dora: Whether magnitudes are learned too.
    """

    rank: int
    size: int = 2
    dropout: bool = False
    dora: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """In which sizes a step computes.

    Args:
        weight: Bytes per weight element that operators see.
        compute: Bytes per element of matrix products.
        autocast: FP32 weights are cast for each matrix product (DDP's mixed precision).
        quantised: How frozen matrices are stored.
        adapter: LoRA, or None for full training.
        stream: Bytes per element of the residual stream; 0 takes what the embedding gives.
    """

    weight: int = 2
    compute: int = 2
    autocast: bool = False
    quantised: Quantised = "none"
    adapter: Adapter | None = None
    stream: int = 0

    @property
    def full(self) -> bool:
        """All weights are trained."""
        return self.adapter is None
