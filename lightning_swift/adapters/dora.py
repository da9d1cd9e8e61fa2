"""DoRA where parameters must stay the objects they are, as under ZeRO-3."""

from __future__ import annotations

from torch import nn

__all__ = ["keep_weights_in_place"]


def keep_weights_in_place(module: nn.Module) -> int:
    """Have the DoRA layers below ``module`` read quantised weights without assigning them anew; return how many.

    peft assigns ``layer.weight`` again after each look at a quantised weight on the CPU, and DeepSpeed's own marks on
    the parameter are lost with it. Changes these layers only. ``apply_adapters`` calls it.
    """
    raise NotImplementedError
