"""A folder that appears whole under its name, or not at all: written as a hidden sibling, committed by one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.errors import ExportError

__all__ = ["POINT_BEFORE_COMMIT", "fresh_folder"]

POINT_BEFORE_COMMIT = "output-before-commit"


@contextmanager
def fresh_folder(output: Path, *, sync: bool = True) -> Iterator[Path]:
    """Give a temporary folder to write into; it becomes ``output`` when the block ends without an error.

    A block that raises leaves nothing behind. A killed process leaves ``.NAME.partial``, which the next call clears.

    Args:
        output: Must not exist, or be an empty directory.
        sync: Wait until the data are on the disk before the rename. Without it a power cut within the next half
            minute can leave cut files (which safetensors refuses to load); the death of the process cannot.

    Raises:
        ExportError: ``output`` holds something, or another process is writing it.
    """
    output = Path(os.path.abspath(output))
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    partial.mkdir(exist_ok=True)
    lock = _lock(partial, output)
    try:
        _clear(partial)
        yield partial
        if sync:
            _sync(partial)
        faultpoint(POINT_BEFORE_COMMIT)
        _refuse_existing(output)
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    _sync_path(output.parent)


def _refuse_existing(output: Path) -> None:
    if os.path.lexists(output) and not (output.is_dir() and not output.is_symlink() and not any(output.iterdir())):
        raise ExportError("something is here already.", where=str(output), fix="Name a folder that does not exist.")


def _lock(partial: Path, output: Path) -> int:
    """Lock the folder; the system drops the lock when the process ends, however it ends."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems have no locks; then two merges into one folder are the user's own doing.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise ExportError("another process is writing this folder.", where=str(output)) from error
    return descriptor


def _clear(folder: Path) -> None:
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
