"""Formulas from papers, as they stand there: the closed form is tested against them."""

from __future__ import annotations

from typing import Literal

__all__ = ["activation_bytes_per_layer"]


def activation_bytes_per_layer(
    length: int,
    batch: int,
    hidden: int,
    heads: int,
    *,
    tensor: int = 1,
    sequence: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Bytes of activations that one GPT layer keeps, in 16 bits with dropout and unfused attention.

    Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equations 1 to 6 and
    table 2: ``s b h (34 + 5 a s / h)``; 10 of the 34 are not cut by tensor parallelism alone; selective recomputation
    drops the ``5 a s / h`` of the attention scores; full recomputation keeps the input.
    """
    unit = length * batch * hidden
    scores = 0.0 if recompute == "selective" else 5 * heads * length / hidden
    if recompute == "full":
        return 2.0 * unit
    if sequence:
        return unit * (34 + scores) / tensor
    return unit * (10 + (24 + scores) / tensor)
