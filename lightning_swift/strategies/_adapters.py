"""Adapters of the mesh strategies: put in, reported, and what sharding cannot take refused."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.quantise import quantised_layers
from lightning_swift.adapters.settings import AdapterSettings
from lightning_swift.errors import ModelError
from lightning_swift.parallel.dtypes import PrecisionPolicy

__all__ = ["add_adapters"]


def add_adapters(module: nn.Module, settings: AdapterSettings, policy: PrecisionPolicy, strategy: str) -> None:
    """Put the adapters into ``module`` before it is cut; say so in one line.

    Raises:
        ModelError: The adapters do not fit the model, or it holds quantised layers of the user's own making.
    """
    for name in quantised_layers(module):
        raise ModelError(
            f"the layer is quantised, and {strategy} cannot cut packed weights over its ranks yet.",
            where=name,
            fix="Load the model without a quantization_config, or use DDPBF16Strategy or ZeRO3QLoRAStrategy.",
        )
    report = apply_adapters(module, settings, compute_dtype=policy.compute_dtype)
    if report.injected:
        rank_zero_info(f"{strategy}: {report}")
