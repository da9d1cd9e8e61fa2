"""Lightning strategies, callbacks and data for training large models on the hardware people really have.

Importing this package registers the strategy names (``Trainer(strategy="swift_fsdp_bf16")``) and nothing else:
every public name is imported on first use, and no optional dependency is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lightning_swift._registration import register_strategies

if TYPE_CHECKING:
    from lightning_swift.adapters.settings import LoraSettings
    from lightning_swift.data.chat import ChatDataModule
    from lightning_swift.errors import SwiftError
    from lightning_swift.models.causal_lm import CausalLM
    from lightning_swift.models.lazy import lazy_pretrained
    from lightning_swift.strategies.auto import AutoStrategy, recommend
    from lightning_swift.strategies.ddp import DDPBF16Strategy
    from lightning_swift.strategies.fsdp import FSDPBF16Strategy
    from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
    from lightning_swift.strategies.zero import ZeROStrategy
    from lightning_swift.strategies.zero_qlora import ZeRO3QLoRAStrategy

__version__ = "0.1.0"

__all__ = [
    "AutoStrategy",
    "CausalLM",
    "ChatDataModule",
    "DDPBF16Strategy",
    "FSDPBF16Strategy",
    "LoraSettings",
    "SwiftError",
    "TensorPipelineStrategy",
    "ZeRO3QLoRAStrategy",
    "ZeROStrategy",
    "lazy_pretrained",
    "recommend",
]

_HOME = {
    "AutoStrategy": "strategies.auto",
    "CausalLM": "models.causal_lm",
    "ChatDataModule": "data.chat",
    "DDPBF16Strategy": "strategies.ddp",
    "FSDPBF16Strategy": "strategies.fsdp",
    "LoraSettings": "adapters.settings",
    "SwiftError": "errors",
    "TensorPipelineStrategy": "strategies.tensor_pipeline",
    "ZeRO3QLoRAStrategy": "strategies.zero_qlora",
    "ZeROStrategy": "strategies.zero",
    "lazy_pretrained": "models.lazy",
    "recommend": "strategies.auto",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


register_strategies()
