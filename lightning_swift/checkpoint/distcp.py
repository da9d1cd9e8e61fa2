"""Index of a torch.distributed.checkpoint directory, read without torch: where the bytes of each tensor lie.

``.metadata`` gives, per tensor, dtype, shape and chunks, and for each chunk a range of a ``.distcp`` file. Such a range
is a whole ``torch.save`` archive (a zip file whose records are stored, not deflated), so the raw bytes of a chunk
are one contiguous run that :func:`locate` finds.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_swift.checkpoint.boxes import Box, check_cover
from lightning_swift.checkpoint.dtypes import ITEM_SIZES
from lightning_swift.checkpoint.layout import METADATA, contained
from lightning_swift.checkpoint.unpickle import DType, StandIn, TensorRef, kind, load_metadata, load_tensor_pickle
from lightning_swift.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError

__all__ = ["BytesEntry", "CheckpointIndex", "Chunk", "RawTensor", "TensorEntry", "locate", "read_index"]

# A pickled tensor description is a few hundred bytes; anything much larger is not one.
_MAX_PICKLE = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
# What zipfile raises on bytes that are not an archive.
_MALFORMED = (zipfile.BadZipFile, KeyError, ValueError, EOFError, NotImplementedError, struct.error)


@dataclass(frozen=True)
class BytesEntry:
    """Range ``[offset, offset + length)`` of ``file`` that holds one ``torch.save`` archive."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """One box of a tensor and the archive that holds it."""

    box: Box
    entry: BytesEntry


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its chunks cover ``shape`` exactly, sorted by offset; empty chunks are left out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the stored dtype."""
        return self.numel * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class RawTensor:
    """Raw little-endian elements of one chunk.

    Args:
        position: Where the element with index 0 on every axis lies in its file, in bytes.
        stride: Elements between neighbours on each axis, None when they lie in row-major order.
        crc: CRC-32 of the bytes as the archive records it; None if the archive holds more than these bytes.
    """

    position: int
    stride: tuple[int, ...] | None
    crc: int | None


@dataclass(frozen=True)
class CheckpointIndex:
    """Every tensor and every other object of a checkpoint, by key, in the order of ``.metadata``."""

    tensors: dict[str, TensorEntry]
    objects: dict[str, BytesEntry]


def read_index(directory: Path) -> CheckpointIndex:
    """Read ``.metadata`` and check it against itself and against the sizes of the files that it names.

    Raises:
        CheckpointNotFoundError: There is no ``.metadata``.
        UnsafeCheckpointError: It names a global, or a file, outside what a checkpoint may name.
        CheckpointCorruptError: Chunks leave holes, overlap, or lie outside their file.
    """
    path = contained(directory, METADATA)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFoundError("no .metadata here.", where=str(directory)) from error
    return _Parser(directory, str(path)).parse(load_metadata(data, where=str(path)))


class _Parser:
    """Turns stand-ins into checked values; every surprise is a :class:`CheckpointCorruptError`."""

    def __init__(self, directory: Path, where: str) -> None:
        self.directory = directory
        self.where = where
        self.file_sizes: dict[str, int] = {}

    def parse(self, metadata: StandIn) -> CheckpointIndex:
        entries = metadata.get("state_dict_metadata")
        storage = metadata.get("storage_data")
        if not isinstance(entries, dict) or not isinstance(storage, dict):
            raise self.bad("it has no state_dict_metadata or no storage_data.")
        located = self.storage(storage)
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, BytesEntry] = {}
        for name, entry in entries.items():
            if not isinstance(name, str):
                raise self.bad(f"the key {name!r} is not text.")
            if kind(entry) == "BytesStorageMetadata":
                objects[name] = self.lookup(located, name, None)
            elif kind(entry) == "TensorStorageMetadata":
                tensors[name] = self.tensor(name, entry, located)
            else:
                raise self.bad(f"{name} is neither a tensor nor an object.")
        return CheckpointIndex(tensors=tensors, objects=objects)

    def storage(self, storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], BytesEntry]:
        located: dict[tuple[str, tuple[int, ...] | None], BytesEntry] = {}
        for index, info in storage.items():
            if kind(index) != "MetadataIndex" or kind(info) != "_StorageInfo":
                raise self.bad("storage_data holds objects of an unknown kind.")
            offset = index.get("offset")
            key = (str(index.get("fqn")), None if offset is None else self.integers(offset, "an offset"))
            if key in located:
                raise self.bad(f"{key[0]} is stored twice at {key[1]}.")
            located[key] = self.entry(key[0], info)
        return located

    def entry(self, name: str, info: StandIn) -> BytesEntry:
        file, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not _natural(offset) or not _natural(length):
            raise self.bad(f"the place of {name} is not a file, an offset and a length.")
        if info.get("transform_descriptors"):
            raise self.bad(f"{name} is stored through a transform (compression), which is not supported.")
        if offset + length > self.file_size(file):
            raise self.bad(f"{name} lies at {offset} + {length} bytes, beyond the end of {file}.")
        return BytesEntry(file=file, offset=offset, length=length)

    def file_size(self, file: str) -> int:
        if file not in self.file_sizes:
            path = contained(self.directory, file)
            try:
                self.file_sizes[file] = path.stat().st_size
            except FileNotFoundError as error:
                raise self.bad(f"{file} is named but not there.") from error
        return self.file_sizes[file]

    def tensor(
        self, name: str, entry: StandIn, located: dict[tuple[str, tuple[int, ...] | None], BytesEntry]
    ) -> TensorEntry:
        shape = self.integers(entry.get("size"), f"the shape of {name}")
        boxes = [self.box(name, chunk) for chunk in self.sequence(entry.get("chunks"), f"the chunks of {name}")]
        filled = sorted((box for box in boxes if box.numel), key=lambda box: box.offsets)
        check_cover(shape, filled, where=f"{self.where}: {name}")
        chunks = tuple(Chunk(box, self.lookup(located, name, box.offsets)) for box in filled)
        return TensorEntry(name=name, dtype=self.dtype(name, entry), shape=shape, chunks=chunks)

    def box(self, name: str, chunk: Any) -> Box:
        if kind(chunk) != "ChunkStorageMetadata":
            raise self.bad(f"a chunk of {name} is of an unknown kind.")
        offsets, sizes = (self.integers(chunk.get(key), f"a chunk of {name}") for key in ("offsets", "sizes"))
        return Box(offsets, sizes)

    def dtype(self, name: str, entry: StandIn) -> str:
        properties = entry.get("properties")
        # TensorProperties pickles as the tuple (dtype, layout, requires_grad, memory format, pinned).
        state = properties.state if kind(properties) == "TensorProperties" else None
        match state:
            case (DType(name=str(dtype)), *_):
                return dtype
            case _:
                raise self.bad(f"{name} has no dtype.")

    def lookup(
        self,
        located: dict[tuple[str, tuple[int, ...] | None], BytesEntry],
        name: str,
        offset: tuple[int, ...] | None,
    ) -> BytesEntry:
        try:
            return located[name, offset]
        except KeyError as error:
            at = "" if offset is None else f" at {offset}"
            raise self.bad(f"{name}{at} is listed but stored nowhere.") from error

    def sequence(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise self.bad(f"{what} is not a list.")
        return list(value)

    def integers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, tuple) or not all(_natural(item) for item in value):
            raise self.bad(f"{what} is not a tuple of natural numbers.")
        return value

    def bad(self, what: str) -> CheckpointError:
        return CheckpointCorruptError(what, where=self.where, fix="Use another checkpoint of the run.")


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _Window(io.RawIOBase):
    """Bytes ``[start, start + length)`` of an open file as a seekable stream; :mod:`zipfile` reads only its tail."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self.fd, self.start, self.length, self.position = fd, start, length, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self.position

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("negative seek position")
        self.position = base + offset
        return self.position

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self.length - self.position)
        data = os.pread(self.fd, left if size is None or size < 0 else min(size, left), self.start + self.position)
        self.position += len(data)
        return data


def locate(fd: int, entry: BytesEntry, *, dtype: str, shape: tuple[int, ...]) -> RawTensor:
    """Find the raw bytes of the tensor whose archive is ``entry``.

    Args:
        fd: Open file ``entry.file``.
        entry: Where the archive lies.
        dtype: Expected dtype; another one in the archive is an error.
        shape: Expected shape.

    Raises:
        UnsafeCheckpointError: The pickle in the archive names a global that is not allowed.
        CheckpointCorruptError: The archive does not hold a tensor of that dtype and shape.
    """
    where = f"{entry.file} at byte {entry.offset}"
    try:
        with zipfile.ZipFile(_Window(fd, entry.offset, entry.length)) as archive:
            tensor, record = _read_archive(archive, where)
        start = entry.offset + record.header_offset
        signature, name_length, extra_length = _LOCAL_HEADER.unpack(os.pread(fd, _LOCAL_HEADER.size, start))
    except _MALFORMED as error:
        raise _unreadable(f"not a readable archive ({error}).", where) from error
    position = start + _LOCAL_HEADER.size + name_length + extra_length
    if signature != b"PK\x03\x04" or position + record.file_size > entry.offset + entry.length:
        raise _unreadable("the archive's directory and its records disagree.", where)
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        found = f"{tensor.dtype} {list(tensor.shape)}"
        raise _unreadable(f"it holds {found} where .metadata says {dtype} {list(shape)}.", where)
    return _view(tensor, record, position, where)


def _read_archive(archive: zipfile.ZipFile, where: str) -> tuple[TensorRef, zipfile.ZipInfo]:
    """The tensor's description and the record that holds its storage."""
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or not _stored(pickles[0]) or pickles[0].file_size > _MAX_PICKLE:
        raise _unreadable("the archive does not hold one data.pkl.", where)
    root = pickles[0].filename.removesuffix("data.pkl")
    tensor = load_tensor_pickle(archive.read(pickles[0]), where=where)
    byteorder = archive.NameToInfo.get(root + "byteorder")
    if byteorder is not None and (not _stored(byteorder) or archive.read(byteorder) != b"little"):
        raise _unreadable("the tensor is not little-endian.", where)
    record = archive.getinfo(f"{root}data/{tensor.storage.key}")
    if not _stored(record):
        raise _unreadable("the tensor's bytes are compressed or encrypted.", where)
    return tensor, record


def _view(tensor: TensorRef, record: zipfile.ZipInfo, position: int, where: str) -> RawTensor:
    """The place of the tensor in its storage, which begins at ``position``."""
    size = ITEM_SIZES[tensor.dtype]
    numbers = (tensor.offset, *tensor.shape, *tensor.stride)
    if not all(map(_natural, numbers)) or len(tensor.shape) != len(tensor.stride):
        raise _unreadable("the tensor's shape, stride and offset make no sense.", where)
    last = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    if math.prod(tensor.shape) and (last + 1) * size > record.file_size:
        raise _unreadable("the tensor is larger than the bytes stored for it.", where)
    start = position + tensor.offset * size
    # The stride of an axis of length one is arbitrary.
    steps = [s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n != 1]
    row_major = steps == list(_row_major([n for n in tensor.shape if n != 1]))
    whole = tensor.offset == 0 and (last + 1) * size == record.file_size
    stride = None if row_major or not math.prod(tensor.shape) else tensor.stride
    return RawTensor(position=start, stride=stride, crc=record.CRC if whole else None)


def _stored(info: zipfile.ZipInfo) -> bool:
    plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED
    return plain and info.compress_size == info.file_size


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _unreadable(what: str, where: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(what, where=where, fix="Use another checkpoint of the run.")
