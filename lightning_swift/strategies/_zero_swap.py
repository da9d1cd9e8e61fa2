"""A folder of its own for each engine's optimizer state on disk, gone when nothing needs it any more.

DeepSpeed names its files after ranks and parameters alone and leaves them behind: two runs with one ``nvme_path``
would read each other's moments without a word, and a disk keeps 16 bytes a parameter of every run.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightning_swift.checkpoint.locks import is_abandoned, lock_folder
from lightning_swift.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_swift.strategies._zero_config import DeepSpeedConfig

__all__ = ["SwapFolder", "swapping_apart"]

_PREFIX = "lightning_swift-"


@dataclass(frozen=True)
class SwapFolder:
    """One engine's folder on one rank.

    Args:
        path: The folder.
        lock: Descriptor by which the folder is locked while it is in use.
        owner: Number of the process that uses it; those that it forks do not remove it.
    """

    path: Path
    lock: int
    owner: int

    @classmethod
    def within(cls, parent: Path) -> Self:
        """Make one below ``parent``, where what killed runs have left is removed.

        Raises:
            ConfigurationError: Nothing can be written there.
        """
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _alone(parent):
                _remove_left_behind(parent)
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                lock = lock_folder(path)
        except OSError as error:
            raise ConfigurationError(
                f"nothing can be written there ({error}).",
                where=f"nvme_path={str(parent)!r}",
                fix="Name a folder on a fast local disk.",
            ) from error
        return cls(path, lock, os.getpid())

    def remove(self) -> None:
        """Remove it and all in it."""
        if os.getpid() != self.owner:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)

    def remove_after(self, user: Any) -> None:
        """Remove it when ``user`` is gone, or the process ends."""
        weakref.finalize(user, self.remove)


def swapping_apart(config: DeepSpeedConfig) -> tuple[DeepSpeedConfig, SwapFolder | None]:
    """A configuration whose optimizer swaps to a folder of its own, and that folder; as it is if nothing is swapped.

    Raises:
        ConfigurationError: Nothing can be written to its ``nvme_path``.
    """
    zero = config["zero_optimization"]
    section = zero.get("offload_optimizer") or {}
    if section.get("device") != "nvme":
        return config, None
    folder = SwapFolder.within(Path(section["nvme_path"]))
    own = {**section, "nvme_path": str(folder.path)}
    return {**config, "zero_optimization": {**zero, "offload_optimizer": own}}, folder


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """One process at a time: between the making of a folder and its lock it would be taken for one left behind."""
    lock = os.open(parent / f"{_PREFIX}lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_left_behind(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/"):
        try:
            abandoned = is_abandoned(path)
        except FileNotFoundError:
            # Its own run has just removed it.
            continue
        if abandoned:
            shutil.rmtree(path, ignore_errors=True)
