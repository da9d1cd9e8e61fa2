"""Checks a checkpoint before anything in it is used; imports no torch and unpickles by allow-list only.

Order: manifest, contained names, no missing or extra file, sizes, hashes, ``.metadata`` against the manifest. A
manifest proves that nothing was damaged since it was written, not who wrote it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from lightning_swift.checkpoint.distcp import CheckpointIndex, read_index
from lightning_swift.checkpoint.layout import (
    HUGGINGFACE,
    MANIFEST,
    METADATA,
    FileRecord,
    Manifest,
    contained,
    read_manifest,
)
from lightning_swift.errors import CheckpointCorruptError, UnsafeCheckpointError

__all__ = ["check_hashes", "hashing_meanwhile", "verify"]

_SHARD_SUFFIX = ".distcp"
_BLOCK = 1 << 18
_FIX = "Use another checkpoint of the run."


def verify(directory: Path, *, hashes: bool = True) -> Manifest:
    """Check that the checkpoint in ``directory`` is whole and leads nowhere else.

    Args:
        directory: The checkpoint.
        hashes: Also read every file and compare its SHA-256. Without it a changed byte of unchanged position goes
            unnoticed, except in the manifest and where it breaks ``.metadata``.

    Returns:
        The manifest.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        UnsafeCheckpointError: A link, a special file, a name that leads outside, or a pickle that names code.
        CheckpointCorruptError: A file is missing, extra, cut or changed, or manifest and ``.metadata`` disagree.
    """
    manifest = read_manifest(directory)
    _check_names(directory, manifest)
    _check_sizes(directory, manifest)
    if hashes:
        check_hashes(directory, manifest)
    _check_tensors(directory, manifest, read_index(directory))
    return manifest


def check_hashes(
    directory: Path, manifest: Manifest, *, tensors: bool = True, stop: threading.Event | None = None
) -> None:
    """Compare the SHA-256 of every file with the manifest, several files at a time; 256 KiB of memory for each.

    Args:
        directory: The checkpoint.
        manifest: Its manifest; names and sizes have been checked.
        tensors: Include the ``.distcp`` files, which are nearly all of the bytes.
        stop: Set it from another thread to end early without a result.

    Raises:
        CheckpointCorruptError: A file's content is not what was saved.
    """
    # The largest first, so that the last thread to finish is not left alone with one of them.
    chosen = [(name, record) for name, record in manifest.files.items() if tensors or not name.endswith(_SHARD_SUFFIX)]
    files = sorted(chosen, key=lambda item: -item[1].size)
    stop = stop or threading.Event()
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        results = [pool.submit(_check_hash, contained(directory, name), record, stop) for name, record in files]
        for result in results:
            try:
                result.result()
            except BaseException:
                stop.set()
                raise


@contextmanager
def hashing_meanwhile(checkpoint: Path, manifest: Manifest, *, enabled: bool) -> Iterator[None]:
    """Check the hashes in other threads while the block runs.

    Args:
        checkpoint: The checkpoint.
        manifest: Its manifest; names and sizes have been checked.
        enabled: False checks only the files that hold no tensors, before the block.

    Raises:
        CheckpointCorruptError: At the end of the block at the latest, if a file's content is not what was saved.
    """
    if not enabled:
        check_hashes(checkpoint, manifest, tensors=False)
        yield
        return
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as pool:
        result = pool.submit(check_hashes, checkpoint, manifest, stop=stop)
        try:
            yield
        except BaseException:
            stop.set()
            raise
        result.result()


def _check_hash(path: Path, record: FileRecord, stop: threading.Event) -> None:
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while (count := file.readinto(block)) and not stop.is_set():
            digest.update(view[:count])
    if not stop.is_set() and digest.hexdigest() != record.sha256:
        raise CheckpointCorruptError(
            f"{path.name} is not as it was saved (SHA-256 differs).", where=str(path), fix=_FIX
        )


def _check_names(directory: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        contained(directory, name)
    if METADATA not in manifest.files:
        raise CheckpointCorruptError(f"the manifest does not list {METADATA}.", where=str(directory), fix=_FIX)
    present = set(_walk(directory))
    if missing := sorted(manifest.files.keys() - present):
        raise CheckpointCorruptError(f"missing {', '.join(missing)}.", where=str(directory), fix=_FIX)
    if extra := sorted(present - manifest.files.keys() - {MANIFEST}):
        raise CheckpointCorruptError(
            f"{', '.join(extra)} is not part of the checkpoint.",
            where=str(directory),
            fix="Nothing writes into a finished checkpoint: move the file elsewhere.",
        )


def _walk(directory: Path) -> Iterator[str]:
    """Names of everything below ``directory``; links and special files are refused, not followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISREG(mode):
                yield entry.name
            elif stat.S_ISDIR(mode) and entry.name == HUGGINGFACE:
                yield from (f"{entry.name}/{name}" for name in _walk(Path(entry.path)))
            elif stat.S_ISDIR(mode):
                yield f"{entry.name}/"
            else:
                raise UnsafeCheckpointError(f"{entry.name!r} is not a regular file.", where=str(directory))


def _check_sizes(directory: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        size = contained(directory, name).stat().st_size
        if size != record.size:
            raise CheckpointCorruptError(
                f"{name} has {size} bytes instead of {record.size}.", where=str(directory / name), fix=_FIX
            )


def _check_tensors(directory: Path, manifest: Manifest, index: CheckpointIndex) -> None:
    listed = {name: (record.shape, record.dtype) for name, record in manifest.tensors.items()}
    stored = {name: (entry.shape, entry.dtype) for name, entry in index.tensors.items()}
    for name in sorted(listed.keys() | stored.keys()):
        if listed.get(name) != stored.get(name):
            raise CheckpointCorruptError(
                f"{name} is {_text(listed.get(name))} in the manifest and {_text(stored.get(name))} in .metadata.",
                where=str(directory),
                fix=_FIX,
            )


def _text(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} {list(tensor[0])}"
