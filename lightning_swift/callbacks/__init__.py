"""Callbacks, imported on first use so that one does not pay for the others."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_swift.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_swift.callbacks.export import ExportForInference
    from lightning_swift.callbacks.memory_report import MemoryReport
    from lightning_swift.callbacks.merge import MergeShardedCheckpoint
    from lightning_swift.callbacks.sharded_checkpoint import ShardedCheckpoint

__all__ = [
    "ActivationCheckpointing",
    "ExportForInference",
    "MemoryReport",
    "MergeShardedCheckpoint",
    "ShardedCheckpoint",
]

_HOME = {
    "ActivationCheckpointing": "activation_checkpointing",
    "ExportForInference": "export",
    "MemoryReport": "memory_report",
    "MergeShardedCheckpoint": "merge",
    "ShardedCheckpoint": "sharded_checkpoint",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
