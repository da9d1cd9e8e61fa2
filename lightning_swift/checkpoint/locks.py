"""Folders that are locked while they are in use, so that what killed processes have left is told from the rest."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_abandoned", "lock_folder"]


def lock_folder(folder: Path) -> int:
    """Lock ``folder``, so that nobody takes it for abandoned; return the descriptor that holds the lock.

    The kernel drops the lock when the descriptor is closed or the process ends, however it ends.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _try_lock(descriptor)
    return descriptor


def is_abandoned(folder: Path) -> bool:
    """Whether no process has locked ``folder``."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        return _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether the lock was free. Some network file systems have no locks: then nothing counts as abandoned."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
