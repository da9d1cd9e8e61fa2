"""Doing one thing on all ranks together: if it fails on any of them, every rank raises the same error.

Without it one rank raises while its peers wait in a collective until the process-group timeout.
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_swift.errors import CheckpointError, SwiftError

__all__ = ["Ranks", "Together", "disk_full"]

_T = TypeVar("_T")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_cpu_group: tuple[Any, Any] = (None, None)


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together; one process where torch.distributed is not in use.

    Args:
        rank: Global rank of this process.
        size: Number of processes.
        group: The process group for objects in host memory; None means the default group.
    """

    rank: int
    size: int
    group: Any = None

    @classmethod
    def current(cls) -> Ranks:
        """All ranks of the default process group. A collective call when the default group cannot use the CPU."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(rank=0, size=1)
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=_coordination_group())

    @property
    def distributed(self) -> bool:
        """Whether there is a process group at all (it may have a single rank)."""
        return dist.is_available() and dist.is_initialized()

    def gather(self, value: _T) -> list[_T]:
        """``value`` of every rank, in order of rank."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError as error:
            raise CheckpointError(
                f"lost contact with another rank ({error}).",
                where=f"rank {self.rank}",
                fix="The rank that ended first says why in its own output.",
            ) from error
        return values

    def broadcast(self, value: _T) -> _T:
        """``value`` of rank 0."""
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _coordination_group() -> Any:
    """None where the default group can talk in host memory, else a gloo group made once per default group.

    NCCL would move every gathered plan and file name through the accelerator.
    """
    global _cpu_group
    world = dist.group.WORLD
    if "gloo" in dist.get_backend_config(world) or dist.get_backend(world) == "mpi":
        return None
    if _cpu_group[0] is not world:
        _cpu_group = (world, dist.new_group(backend="gloo"))
    return _cpu_group[1]


@dataclass(frozen=True)
class _Failure:
    rank: int
    kind: str
    text: str
    error: SwiftError | None

    def as_error(self, doing: str, where: str) -> SwiftError:
        if self.error is not None:
            # Keep the kind of the first cause: a corrupt file, a mismatch, a full disk each have their own cure.
            place = where if self.error.where is None else self.error.where
            return type(self.error)(self.error.what, where=f"rank {self.rank}, {place}", fix=self.error.fix)
        return CheckpointError(f"{doing} failed on rank {self.rank}: {self.kind}: {self.text}", where=where)


class Together:
    """``with Together(ranks, "writing", path) as step: step.value = ...``: afterwards ``step.values`` has all ranks'.

    If the body raises on any rank, every rank raises the error of the lowest rank that failed, except that a rank that
    was interrupted (KeyboardInterrupt) or told to exit raises just that. A collective call. The
    body may make collective calls only if an error before them reaches all ranks: else the others would wait there.

    Args:
        ranks: Who takes part.
        doing: What is being done, in words that fit before "failed on rank 1".
        path: The checkpoint concerned.
    """

    def __init__(self, ranks: Ranks, doing: str, path: Path) -> None:
        self.ranks = ranks
        self.doing = doing
        self.path = path
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> Together:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None else self._describe(error)
        reports = self.ranks.gather((failure, self.value if failure is None else None))
        self.values = [value for _, value in reports]
        first = next((failure for failure, _ in reports if failure is not None), None)
        interrupt = self._interrupt(error)
        if interrupt is not None and interrupt is not error:
            raise interrupt from None
        if first is not None and interrupt is None:
            raise first.as_error(self.doing, str(self.path)) from error

    def _interrupt(self, error: BaseException | None) -> BaseException | None:
        """KeyboardInterrupt or SystemExit of this rank, which torch wraps like any failure of a save."""
        own = error.failures.get(self.ranks.rank, (None,))[0] if isinstance(error, CheckpointException) else error
        return None if isinstance(own, (Exception, CheckpointException)) else own

    def _describe(self, error: BaseException) -> _Failure:
        rank, cause = self.ranks.rank, error
        if isinstance(error, CheckpointException) and error.failures:
            # torch has gathered the failures of all ranks already; this error stands for the first of them.
            rank = min(error.failures)
            cause = error.failures[rank][0]
        if isinstance(cause, OSError) and not isinstance(cause, SwiftError) and cause.errno in _DISK_FULL:
            cause = disk_full(cause, self.path, need=None)
        swift = cause if isinstance(cause, SwiftError) else None
        return _Failure(rank=rank, kind=type(cause).__name__, text=str(cause), error=swift)


def disk_full(error: OSError, path: Path, *, need: int | None) -> CheckpointError:
    """What to tell the user when the disk of ``path`` is full; ``need`` is what this rank had to write, in bytes."""
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    needed = "" if need is None else f" This rank needs {need:,} bytes for it."
    return CheckpointError(
        f"no space left on the device ({error.strerror}).{needed} {free:,} bytes are free.",
        where=str(path),
        fix="Free some space, keep fewer checkpoints (save_top_k), or name another directory.",
    )
