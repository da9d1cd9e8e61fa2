"""The commit protocol: a checkpoint appears under its name at once and whole, or not at all.

Every rank writes into a hidden sibling ``.NAME.tmp-ID``; each file is synced and hashed by the rank that wrote it;
rank 0 writes the manifest, syncs the directory, renames it to NAME and syncs the parent. A name that exists is never
written into: the old directory is renamed to ``.NAME.old-ID``, the new one to NAME, then the old one is deleted. If
the process dies between those two renames NAME is missing, and :func:`locate` finds the old one.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.checkpoint.layout import HUGGINGFACE, MANIFEST, META, METADATA, FileRecord, Manifest, read_manifest
from lightning_swift.checkpoint.locks import is_abandoned, lock_folder
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointError, CheckpointNotFoundError

__all__ = [
    "FAULTPOINTS",
    "POINT_AFTER_RENAME",
    "POINT_BEFORE_DATA",
    "POINT_BEFORE_MANIFEST",
    "POINT_BEFORE_RENAME",
    "POINT_BEFORE_RETENTION",
    "POINT_BETWEEN_RENAMES",
    "POINT_MIDDLE_OF_DATA",
    "commit",
    "is_checkpoint",
    "locate",
    "record_file",
    "refuge",
    "remove",
]

POINT_BEFORE_DATA = "before-data"
POINT_MIDDLE_OF_DATA = "middle-of-data"
POINT_BEFORE_MANIFEST = "before-manifest"
POINT_BEFORE_RENAME = "before-rename"
POINT_BETWEEN_RENAMES = "between-renames"
POINT_AFTER_RENAME = "after-rename"
POINT_BEFORE_RETENTION = "before-retention"

FAULTPOINTS = (
    POINT_BEFORE_DATA,
    POINT_MIDDLE_OF_DATA,
    POINT_BEFORE_MANIFEST,
    POINT_BEFORE_RENAME,
    POINT_BETWEEN_RENAMES,
    POINT_AFTER_RENAME,
    POINT_BEFORE_RETENTION,
)
"""Every point of a save where a test may strike, in order; every rank passes every one of them.

Only "between-renames" depends on the situation: rank 0 passes it when the name exists already.
"""

_LOG = logging.getLogger(__name__)
_OWN_FILES = re.compile(
    rf"{re.escape(MANIFEST)}|{re.escape(METADATA)}(\.tmp)?|{re.escape(META)}|__\d+_\d+\.distcp|{HUGGINGFACE}"
)


def commit(
    path: Path,
    write: Callable[[Path], dict[str, FileRecord]],
    describe: Callable[[dict[str, FileRecord]], Manifest],
    *,
    run_id: str,
) -> None:
    """Write a checkpoint to ``path`` by the protocol above. A collective call; works without torch.distributed too.

    Args:
        path: Where the checkpoint shall appear; the same on all ranks.
        write: Called on every rank with the temporary directory; writes this rank's files and returns their records
            by name relative to it (see :func:`record_file`). Where it makes collective calls, an error before the last
            of them must reach all ranks through them, as torch.distributed.checkpoint has it.
        describe: Called on rank 0 with the records of all ranks; returns the manifest.
        run_id: The run that saves. A checkpoint of another run is not replaced.

    Raises:
        CheckpointError: On every rank, if anything failed on any of them; the temporary directory is gone then, and
            whatever was at ``path`` is untouched.
    """
    ranks = Ranks.current()
    published = everywhere = False
    lock = None
    with Together(ranks, "preparing to save", path) as step:
        if ranks.rank == 0:
            step.value = _prepare(path, run_id)
            lock = lock_folder(step.value)
    temporary: Path = step.values[0]
    try:
        with Together(ranks, "writing", path):
            faultpoint(POINT_BEFORE_DATA)
        with Together(ranks, "writing", path) as step:
            step.value = write(temporary)
        files = {name: record for records in step.values for name, record in records.items()}
        with Together(ranks, "committing", path):
            _publish(temporary, path, files, describe, ranks)
            published = True
        everywhere = True
    finally:
        if ranks.rank == 0 and not published:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        if not everywhere:
            # No rank goes on with the error before rank 0 has cleaned up.
            ranks.gather(None)


def refuge(path: Path, run_id: str) -> tuple[Path, CheckpointError | None]:
    """Where to save what was meant for ``path``: there, or, if it may not be replaced, under a free name beside it.

    Returns:
        The path to use, and the reason why it is not ``path`` (None if it is).
    """
    try:
        _refuse_foreign(path, run_id)
    except CheckpointError as error:
        free = (path.with_name(f"{path.stem}-v{number}{path.suffix}") for number in itertools.count(1))
        return next(name for name in free if not os.path.lexists(name)), error
    return path, None


def record_file(path: Path) -> FileRecord:
    """Sync ``path`` to the disk and hash it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(size=file.tell(), sha256=digest)


def locate(path: Path) -> Path:
    """``path`` itself, or the old checkpoint that a crash between the two renames has left beside it.

    Raises:
        CheckpointNotFoundError: There is neither.
    """
    if path.exists():
        return path
    for old in _siblings(path, "old"):
        if (old / MANIFEST).is_file():
            _LOG.warning("%s is missing because a save was cut short; reading the previous one, %s.", path, old)
            return old
    raise CheckpointNotFoundError("there is no checkpoint here.", where=str(path))


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a checkpoint file, or a directory that holds nothing but a checkpoint or its remains."""
    if path.is_dir():
        return all(_OWN_FILES.fullmatch(entry.name) for entry in path.iterdir())
    return path.is_file() and path.suffix in {".ckpt", ".pt"}


def remove(path: Path) -> None:
    """Delete a checkpoint: a directory, a file, or a link to one (then only the link). For one rank to call.

    Raises:
        CheckpointError: ``path`` holds something else than a checkpoint; nothing is deleted.
    """
    if path.is_symlink():
        path.unlink()
        return
    if not path.exists():
        return
    if not is_checkpoint(path):
        raise CheckpointError(
            "not deleted: this is not a checkpoint, or it holds other files as well.",
            where=str(path),
            fix="Delete it by hand if it is in the way.",
        )
    _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Without its manifest it is no checkpoint any more, however far the rest gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink()


def _prepare(path: Path, run_id: str) -> Path:
    """Refuse what may not be replaced, clear what dead saves have left, and make the temporary directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path)
    _refuse_foreign(path, run_id)
    for stale in _siblings(path, "tmp"):
        if is_abandoned(stale):
            shutil.rmtree(stale, ignore_errors=True)
        else:
            _LOG.warning("%s is left from another save; delete it if that run is dead.", stale)
    temporary = _sibling(path, "tmp")
    temporary.mkdir()
    return temporary


def _recover(path: Path) -> None:
    """Finish a replacement that a crash has cut: put the old checkpoint back, or delete it if the new one is there."""
    for old in _siblings(path, "old"):
        if os.path.lexists(path):
            _delete(old)
        else:
            os.rename(old, path)


def _refuse_foreign(path: Path, run_id: str) -> None:
    if path.is_symlink() or not path.exists():
        return
    if not is_checkpoint(path):
        raise CheckpointError(
            "something that is not a checkpoint is here, and it is not overwritten.",
            where=str(path),
            fix="Name another path for the checkpoint.",
        )
    if path.is_dir() and (path / MANIFEST).exists() and read_manifest(path).run.id != run_id:
        raise CheckpointError(
            f"a checkpoint of another run ({read_manifest(path).run.id}) is here, and it is not overwritten.",
            where=str(path),
            fix='Resume that run (ckpt_path="newest"), name another directory, or delete the checkpoint.',
        )


def _publish(
    temporary: Path,
    path: Path,
    files: dict[str, FileRecord],
    describe: Callable[[dict[str, FileRecord]], Manifest],
    ranks: Ranks,
) -> None:
    faultpoint(POINT_BEFORE_MANIFEST)
    if ranks.rank == 0:
        manifest = temporary / MANIFEST
        manifest.write_text(describe(files).to_json(), encoding="utf-8")
        record_file(manifest)
        for directory in (*(entry for entry in temporary.iterdir() if entry.is_dir()), temporary):
            _sync_directory(directory)
    faultpoint(POINT_BEFORE_RENAME)
    if ranks.rank == 0:
        _rename(temporary, path)
    faultpoint(POINT_AFTER_RENAME)


def _rename(temporary: Path, path: Path) -> None:
    old = None
    if os.path.lexists(path):
        old = _sibling(path, "old")
        os.rename(path, old)
        try:
            faultpoint(POINT_BETWEEN_RENAMES)
            os.rename(temporary, path)
        except OSError:
            os.rename(old, path)
            raise
    else:
        os.rename(temporary, path)
    _sync_directory(path.parent)
    if old is not None:
        _delete(old)


def _sibling(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.{role}-{secrets.token_hex(4)}")


def _siblings(path: Path, role: str) -> list[Path]:
    """Hidden siblings of ``path`` that an earlier save has left, in order of name."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.{role}-[0-9a-f]{{8}}")
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
