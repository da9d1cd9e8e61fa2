"""Sharded checkpoints of the mesh engine."""

from __future__ import annotations

__all__ = ["ShardedCheckpointing"]


class ShardedCheckpointing:
    """Mixin for strategies that save their shards; Lightning's own methods for now."""
