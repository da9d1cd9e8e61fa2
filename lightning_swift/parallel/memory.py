"""Keeps the C library from holding on to memory that the shards have given back."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["ReturnMemory", "return_freed_memory", "returning_freed_memory", "trim_freed_memory"]

ReturnMemory = bool | Literal["auto"]

# M_MMAP_THRESHOLD in malloc.h, and the size in bytes from which a block is mapped on its own.
_M_MMAP_THRESHOLD = -3
_THRESHOLD = 1 << 20
# M_TRIM_THRESHOLD, and the free bytes at the end of the heap that are kept: what glibc comes to by itself once large
# blocks have been freed. Its first one, 128 KiB, has activations below the other threshold go back and be faulted in
# again all through a step: up to a tenth of the CPU time of a ZeRO-3 step, by the heap's layout.
_M_TRIM_THRESHOLD = -1
_KEPT = 64 << 20
_KEPT_WHILE_LOADING = 128 << 10
# What glibc itself comes to for both once large blocks have been freed.
_USUAL = 32 << 20, 64 << 20


def return_freed_memory() -> bool:
    """Make glibc return large freed blocks to the system at once. True if it took effect.

    Glibc raises its mmap threshold after each large free and then keeps gathered parameters in fragmented heaps,
    which on CPU eats all that sharding saves (1657 MB against 945 MB per rank, 64 M parameters on 2 ranks).
    """
    return _set_thresholds(_THRESHOLD, _KEPT)


@contextmanager
def returning_freed_memory(*, afterwards: bool = False) -> Iterator[None]:
    """As :func:`return_freed_memory`, and down to the last page, for as long as it is active: for loading.

    There it costs no step any time. ``afterwards`` says whether memory is to be returned after that too.
    """
    _set_thresholds(_THRESHOLD, _KEPT_WHILE_LOADING)
    try:
        yield
    finally:
        _set_thresholds(*((_THRESHOLD, _KEPT) if afterwards else _USUAL))


def _set_thresholds(mapped: int, kept: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, mapped)) and bool(mallopt(_M_TRIM_THRESHOLD, kept))


def trim_freed_memory() -> None:
    """Make glibc return all free pages of its heaps now, also those between blocks in use. Costs about a millisecond.

    What is under the mmap threshold, as the pieces of a matrix that is being quantised, lies in these heaps and keeps
    what was freed around it (1.4 x the BF16 size of a model of 92 M parameters, quantised while it was read).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)
