"""Puts LoRA adapters, and quantised layers under them, into the Hugging Face model of any module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lightning_swift.adapters.settings import AdapterSettings

__all__ = ["AdapterReport", "apply_adapters"]


@dataclass(frozen=True)
class AdapterReport:
    """What was done to a module.

    Args:
        model: Name of the attribute that holds the Hugging Face model (now its peft wrapper); "" if there is none.
        injected: Whether adapters were put in (not if the user's own were found).
        adapted: Names of the layers with adapters, relative to the Hugging Face model.
        quantised: Names of the layers stored in 4 or 8 bits, relative to the Hugging Face model.
        trainable: Number of trainable elements of the module.
        total: Number of elements of the module, before packing.
    """

    model: str = ""
    injected: bool = False
    adapted: tuple[str, ...] = ()
    quantised: tuple[str, ...] = ()
    trainable: int = 0
    total: int = 0


def apply_adapters(
    module: nn.Module,
    settings: AdapterSettings,
    *,
    compute_dtype: torch.dtype,
    storage_dtype: torch.dtype = torch.uint8,
) -> AdapterReport:
    """Put what ``settings`` ask for into the one Hugging Face model below ``module``, in place.

    Frozen parameters are kept in ``compute_dtype``, adapters in float32. Linear layers but the head are quantised:
    at once and one by one in a model with weights; while ``load_lazy_weights`` reads them in a lazy one. Also guards
    quantised layers that the user's own code has made, so every strategy calls it for every module, even without
    ``lora``. A second call does nothing.

    Args:
        module: A LightningModule, or anything that holds a Hugging Face model.
        settings: Adapters and quantisation.
        compute_dtype: What the engine computes in: bfloat16, or float32.
        storage_dtype: What packed 4-bit weights pretend to be. uint8 survives every cast; any other value must be
            the engine's own dtype, since a cast rewrites the bytes.

    Returns:
        What was done.

    Raises:
        ModelError: There is no Hugging Face model or several; the model holds adapters or quantised layers already
            and the settings ask for others; no layer is called as ``target_modules`` says.
    """
    raise NotImplementedError
