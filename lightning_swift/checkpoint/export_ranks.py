"""Ranks that wait for one of them for as long as it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from lightning_swift.checkpoint.together import Ranks

__all__ = ["patient_ranks"]

# Merging and verifying a large model on rank 0 outlasts the usual timeouts of 10 to 30 minutes. A rank that dies still
# ends the wait at once, since gloo notices the closed connection.
_PATIENCE = timedelta(days=1)


@contextmanager
def patient_ranks() -> Iterator[Ranks]:
    """All ranks, over a gloo group of their own whose collectives wait for a day. A collective call."""
    if not (dist.is_available() and dist.is_initialized()):
        yield Ranks(rank=0, size=1)
        return
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    try:
        yield Ranks(rank=dist.get_rank(), size=dist.get_world_size(), group=group)
    finally:
        dist.destroy_process_group(group)
