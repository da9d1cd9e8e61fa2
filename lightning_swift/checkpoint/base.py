"""The pretrained folder whose weights a checkpoint does not repeat: described when saving, verified when reading.

Weight files are known by size and CRC-32, which runs at the speed of the disk and finds every change that is not made
on purpose to deceive; config and index files by SHA-256. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from lightning_swift.checkpoint.dtypes import ITEM_SIZES, SAFETENSORS_NAMES, Block
from lightning_swift.checkpoint.layout import BaseFile, BaseRecord, BaseTensor
from lightning_swift.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError

__all__ = ["BaseEntry", "base_entries", "base_files", "describe_files", "differing_files", "verified_base"]

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
_WEIGHTS = ".safetensors"
_BLOCK = 1 << 20
_LARGEST_HEADER = 100_000_000
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}


@dataclass(frozen=True)
class BaseEntry:
    """One tensor in a safetensors file of the folder.

    Args:
        name: Its name there.
        dtype: The dtype in which its elements are given; those of the file are converted.
        shape: Its shape.
        path: The file.
        position: Where its elements begin.
        stored: Dtype in the file.
        parts: Where the folder has many tensors for this one, these in the order of their elements; the path, position
            and stored dtype are then those of the first.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    position: int
    stored: str
    parts: tuple[BaseEntry, ...] = ()

    def stream(self) -> Iterator[Block]:
        """The elements in row-major order, in ``dtype``; each block is valid until the next one."""
        if self.parts:
            return chain.from_iterable(part.stream() for part in self.parts)
        if self.stored == self.dtype:
            return self._raw()
        from lightning_swift.checkpoint.casting import Caster

        return map(Caster(self.stored, self.dtype, where=self.name), self._raw())

    def _raw(self) -> Iterator[Block]:
        left = ITEM_SIZES[self.stored]
        for length in self.shape:
            left *= length
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.position)
            while left:
                block = file.read(min(left, _BLOCK))
                if not block:
                    raise CheckpointCorruptError("the file ended while it was read.", where=str(self.path))
                left -= len(block)
                yield block


def base_files(folder: Path) -> tuple[str, ...]:
    """The files of a Hugging Face folder that decide the weights of its model; empty if it has no safetensors."""
    if (folder / _INDEX).is_file():
        content = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return (_CONFIG, _INDEX, *sorted(set(content["weight_map"].values())))
    return (_CONFIG, _SINGLE) if (folder / _SINGLE).is_file() else ()


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, BaseFile]:
    """Size and digest of files of ``folder``, several read at a time."""
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return {name: record for name, record in pool.map(lambda name: (name, _describe(folder / name)), names)}


def differing_files(folder: Path, files: dict[str, BaseFile]) -> list[str]:
    """Names of ``files`` that are missing from ``folder`` or have other content there; sizes are compared first."""
    wrong = [name for name, record in files.items() if _size(folder / name) != record.size]
    return wrong or sorted(name for name, record in describe_files(folder, files).items() if record != files[name])


def verified_base(base: BaseRecord, moved: Path | None = None) -> Path:
    """The folder of a checkpoint's frozen weights, once its files are known to be what they were.

    Args:
        base: From the manifest.
        moved: Where the folder lies now, if not where it was.

    Raises:
        CheckpointNotFoundError: The folder is gone.
        CheckpointMismatchError: A file of it is missing or has changed.
    """
    folder = Path(base.folder) if moved is None else moved
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            "the pretrained folder is not there, and the checkpoint holds only what was trained on top of it.",
            where=str(folder),
            fix="Put it back, or say where it is: `--base FOLDER` for merge and export; build the model from the moved "
            "folder for a resume.",
        )
    wrong = differing_files(folder, base.files)
    if wrong:
        raise CheckpointMismatchError(
            f"{', '.join(wrong)}: changed or missing since the checkpoint was saved, which holds "
            "only what was trained on top of this folder.",
            where=str(folder),
            fix="Restore the folder, or name a whole copy of it.",
        )
    return folder


def base_entries(base: BaseRecord, folder: Path) -> dict[str, BaseEntry]:
    """Where the tensors of ``base`` lie in the verified ``folder``, by parameter name.

    Raises:
        CheckpointCorruptError: A tensor is not there or has another shape.
    """
    found: dict[str, tuple[Path, int, str, tuple[int, ...]]] = {}
    for name in base.files:
        if name.endswith(_WEIGHTS):
            found |= _header(folder / name)
    return {name: _entry(tensor, found, folder) for name, tensor in base.tensors.items()}


def _entry(tensor: BaseTensor, found: dict[str, tuple[Path, int, str, tuple[int, ...]]], folder: Path) -> BaseEntry:
    names = tensor.parts or (tensor.name,)
    held = [found[name] for name in names if name in found]
    shapes = [shape for *_, shape in held]
    fits = sum(map(prod, shapes)) == prod(tensor.shape) if tensor.parts else shapes == [tensor.shape]
    if len(held) != len(names) or not fits:
        raise CheckpointCorruptError(f"the folder has no {tensor.name} of {list(tensor.shape)}.", where=str(folder))
    path, position, stored, _ = held[0]
    parts = tuple(
        BaseEntry(name, tensor.dtype, shape, path, position, stored)
        for name, (path, position, stored, shape) in zip(tensor.parts, held, strict=False)
    )
    return BaseEntry(tensor.name, tensor.dtype, tensor.shape, path, position, stored, parts)


def _header(path: Path) -> dict[str, tuple[Path, int, str, tuple[int, ...]]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LARGEST_HEADER:
            raise CheckpointCorruptError("the file has no safetensors header.", where=str(path))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: (path, 8 + length + entry["data_offsets"][0], _DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def _describe(path: Path) -> BaseFile:
    weights = path.name.endswith(_WEIGHTS)
    size = checksum = 0
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            view = memoryview(block)[:count]
            size += count
            if weights:
                checksum = crc32(view, checksum)
            else:
                digest.update(view)
    return BaseFile(size, f"crc32:{checksum:08x}" if weights else f"sha256:{digest.hexdigest()}")


def _size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None
