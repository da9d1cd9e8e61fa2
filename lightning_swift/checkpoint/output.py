"""A folder that appears whole under its name, or not at all: written as a hidden sibling, committed by one rename.

An earlier export may be replaced: it moves aside, the new one moves in, and only then it is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.checkpoint.layout import MANIFEST
from lightning_swift.errors import ExportError

__all__ = ["POINT_BEFORE_COMMIT", "POINT_BETWEEN_RENAMES", "check_output", "fresh_folder"]

POINT_BEFORE_COMMIT = "output-before-commit"
POINT_BETWEEN_RENAMES = "output-between-renames"

_WEIGHTS = r"(adapter_)?model(-\d+-of-\d+)?\.safetensors"
_EXPORT_FILES = re.compile(
    rf"{_WEIGHTS}|(adapter_)?model\.safetensors\.index\.json|(config|generation_config|adapter_config)\.json"
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json|chat_template\.jinja"
    r"|merges\.txt|vocab\.txt|(tokenizer|spiece|sentencepiece\.bpe)\.model"
)


@contextmanager
def fresh_folder(output: Path, *, sync: bool = True, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write into; it becomes ``output`` when the block ends without an error.

    A block that raises leaves nothing behind. A killed process leaves ``.NAME.partial``, which the next call clears;
    killed between the two renames of a replacement also ``.NAME.replaced``, which the next call puts back.

    Args:
        output: Must not exist, or be an empty directory, and not lie in a checkpoint.
        sync: Wait until the data are on the disk before the rename. Without it a power cut within the next half
            minute can leave cut files (which safetensors refuses to load); the death of the process cannot.
        overwrite: ``output`` may also be an earlier export, which is replaced; then the data are always synced.

    Raises:
        ExportError: ``output`` holds something, lies in a checkpoint, or another process is writing it.
    """
    output = Path(os.path.abspath(output))
    check_output(output, overwrite=overwrite)
    output.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(output) as partial:
        _clear(partial)
        yield partial
        if sync or overwrite:
            _sync(partial)
        faultpoint(POINT_BEFORE_COMMIT)
        _refuse_existing(output, overwrite=overwrite)
        _commit(partial, output)
    _sync_path(output.parent)


def check_output(output: Path, *, overwrite: bool = False) -> None:
    """Refuse a place where :func:`fresh_folder` could not write; first finish a replacement that was cut short.

    Raises:
        ExportError: As :func:`fresh_folder`.
    """
    output = Path(os.path.abspath(output))
    if _holds_export_files_only(_aside(output)):
        with _claimed(output) as partial:
            _recover(output)
            shutil.rmtree(partial)
    _refuse_existing(output, overwrite=overwrite)
    _refuse_checkpoint(output)


@contextmanager
def _claimed(output: Path) -> Iterator[Path]:
    """The locked temporary folder of ``output``; deleted if the block raises."""
    partial = output.with_name(f".{output.name}.partial")
    partial.mkdir(exist_ok=True)
    lock = _lock(partial, output)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _commit(partial: Path, output: Path) -> None:
    if not _is_occupied(output):
        os.rename(partial, output)
        return
    aside = _aside(output)
    os.rename(output, aside)
    try:
        faultpoint(POINT_BETWEEN_RENAMES)
        os.rename(partial, output)
    except BaseException:
        if not os.path.lexists(output):
            os.rename(aside, output)
        raise
    _sync_path(output.parent)
    # What cannot be deleted now is tried again by the next call.
    shutil.rmtree(aside, ignore_errors=True)


def _recover(output: Path) -> None:
    """Put an export that was moved aside back, or delete it if its successor is there."""
    if _is_occupied(output):
        shutil.rmtree(_aside(output))
    else:
        os.rename(_aside(output), output)


def _aside(output: Path) -> Path:
    return output.with_name(f".{output.name}.replaced")


def _is_occupied(output: Path) -> bool:
    return os.path.lexists(output) and not (output.is_dir() and not output.is_symlink() and not any(output.iterdir()))


def _holds_export_files_only(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir():
        return False
    return all(
        _EXPORT_FILES.fullmatch(entry.name) and entry.is_file() and not entry.is_symlink() for entry in folder.iterdir()
    )


def _is_export(folder: Path) -> bool:
    return _holds_export_files_only(folder) and any(re.fullmatch(_WEIGHTS, entry.name) for entry in folder.iterdir())


def _refuse_existing(output: Path, *, overwrite: bool) -> None:
    if not _is_occupied(output):
        return
    if not overwrite:
        raise ExportError(
            "something is here already.",
            where=str(output),
            fix="Name a folder that does not exist, or replace an earlier export with overwrite=True (--overwrite).",
        )
    if not _is_export(output):
        raise ExportError(
            "something is here already, and it is not replaced: it is not an earlier export and nothing else.",
            where=str(output),
            fix="Move it away, or name another folder.",
        )


def _refuse_checkpoint(output: Path) -> None:
    """Refuse a folder in a checkpoint, which would be damaged: it holds exactly the files that its manifest names."""
    place = Path(os.path.realpath(output))
    for folder in (place, *place.parents):
        # A checkpoint that is yet to be saved is known by its name alone.
        if (folder / MANIFEST).is_file() or (folder != place and folder.suffix == ".ckpt"):
            raise ExportError(
                f"this folder lies in the checkpoint {folder}, which would be damaged.",
                where=str(output),
                fix="Name a folder outside of it.",
            )


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
