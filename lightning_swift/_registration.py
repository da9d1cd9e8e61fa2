"""Strategy names for ``Trainer(strategy="...")``, registered when Lightning is loaded and not before.

Lightning has no entry point for strategies, so a name must be in its registry before the Trainer is built. Importing
Lightning here would cost seconds in commands that never train (``merge`` imports neither torch nor Lightning), so
the names are entered as soon as ``lightning.pytorch`` itself has been imported, whichever package comes first.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_strategies"]

_LIGHTNING = "lightning.pytorch"

# Name -> module, class, description.
_NAMES: dict[str, tuple[str, str, str]] = {
    "swift_auto": (
        "lightning_swift.strategies.auto",
        "AutoStrategy",
        "The strategy that the planner recommends for the model and this machine",
    ),
    "swift_ddp": (
        "lightning_swift.strategies.ddp",
        "DDPBF16Strategy",
        "DDP with BF16 compute and FP32 weights, moments and reductions",
    ),
    "swift_fsdp_bf16": (
        "lightning_swift.strategies.fsdp",
        "FSDPBF16Strategy",
        "FSDP2 with BF16 compute and FP32 master weights, moments and reductions",
    ),
    "swift_tp_pp": (
        "lightning_swift.strategies.tensor_pipeline",
        "TensorPipelineStrategy",
        "Tensor and pipeline parallelism with BF16 compute, FSDP2 on the ranks that are left",
    ),
    "swift_zero1": (
        "lightning_swift.strategies.zero",
        "ZeROStrategy",
        "DeepSpeed ZeRO-1 with BF16 compute: optimizer state is cut over all ranks",
    ),
    "swift_zero2": (
        "lightning_swift.strategies.zero",
        "ZeROStrategy",
        "DeepSpeed ZeRO-2 with BF16 compute: optimizer state and gradients are cut over all ranks",
    ),
    "swift_zero3": (
        "lightning_swift.strategies.zero",
        "ZeROStrategy",
        "DeepSpeed ZeRO-3 with BF16 compute: parameters, too, are cut over all ranks",
    ),
    "swift_zero3_offload": (
        "lightning_swift.strategies.zero",
        "ZeROStrategy",
        "DeepSpeed ZeRO-3 with BF16 compute; parameters and optimizer state lie in host memory",
    ),
    "swift_zero3_qlora": (
        "lightning_swift.strategies.zero_qlora",
        "ZeRO3QLoRAStrategy",
        "DeepSpeed ZeRO-3 with LoRA adapters on 4-bit weights",
    ),
}

# What a name stands for besides its class.
_ARGUMENTS: dict[str, dict[str, object]] = {
    "swift_zero1": {"stage": 1},
    "swift_zero2": {"stage": 2},
    "swift_zero3": {"stage": 3},
    "swift_zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
}


class _Factory:
    """Builds the strategy on first use, so that registering a name imports nothing."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self.__name__ = name

    def __call__(self, **init_args: Any) -> object:
        strategy: Any = getattr(import_module(self._module), self.__name__)(**init_args)
        # Nobody chose its options, so the Trainer's may decide where they would otherwise contradict.
        strategy.chosen_by_name = True
        return strategy


class _AfterExec(importlib.abc.Loader):
    """Runs a module with its own loader, then registers the names."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


class _LightningWatcher(importlib.abc.MetaPathFinder):
    """Notices the first import of ``lightning.pytorch``, then takes itself off the import path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIGHTNING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterExec(spec.loader)
        return spec


def register_strategies() -> None:
    """Register every strategy name now if Lightning is loaded, otherwise when it is."""
    module = sys.modules.get(_LIGHTNING)
    if module is not None and hasattr(module, "Trainer"):
        _register()
    elif not any(isinstance(finder, _LightningWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LightningWatcher())


def _register() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    for name, (module, cls, description) in _NAMES.items():
        StrategyRegistry.register(
            name, _Factory(module, cls), description=description, override=True, **_ARGUMENTS.get(name, {})
        )
