"""Streams a tensor of a checkpoint in row-major order, however it was sharded, within a few megabytes of memory.

Each byte is read once and checked on the way against the CRC-32 that its archive records, so a changed byte of a
tensor is found even where the SHA-256 of whole files is not compared.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from zlib_ng.zlib_ng import crc32

from lightning_swift.checkpoint.boxes import Box
from lightning_swift.checkpoint.distcp import Chunk, TensorEntry, locate
from lightning_swift.checkpoint.dtypes import ITEM_SIZES, Block
from lightning_swift.checkpoint.layout import contained
from lightning_swift.errors import CheckpointCorruptError

__all__ = ["read_tensor", "stream_tensor"]

# 512 KiB stay in a core's second-level cache; half of it took a tenth longer in calls, twice of it half as long again.
_BLOCK = 1 << 19
# Working memory for tensors that are not split along their first axis alone.
_STRIP = 1 << 22


def stream_tensor(directory: Path, tensor: TensorEntry) -> Iterator[Block]:
    """The bytes of ``tensor`` in row-major order; each block is valid until the next one is asked for.

    Safe to call from several threads at once.

    Args:
        directory: A checkpoint whose names have been checked.
        tensor: From its index.

    Raises:
        CheckpointCorruptError: An archive does not hold what ``.metadata`` says, or its bytes have changed.
    """
    if all(_full_rows(chunk.box, tensor.shape) for chunk in tensor.chunks):
        for chunk in tensor.chunks:
            with _ChunkReader(directory, chunk, tensor.dtype) as reader:
                if reader.raw.stride is None:
                    yield from reader.blocks(0, reader.nbytes)
                    continue
                # Rows of another order in memory: put together like any other layout, by itself.
                part = Chunk(Box(tuple(0 for _ in chunk.box.sizes), chunk.box.sizes), chunk.entry)
            yield from _assembled(directory, TensorEntry(tensor.name, tensor.dtype, chunk.box.sizes, (part,)))
    else:
        yield from _assembled(directory, tensor)


def read_tensor(directory: Path, tensor: TensorEntry) -> bytes:
    """All bytes of ``tensor`` at once."""
    return b"".join(bytes(block) for block in stream_tensor(directory, tensor))


class _ChunkReader:
    """Reads one chunk from its first byte to its last; leaving the ``with`` block checks that they are as written."""

    def __init__(self, directory: Path, chunk: Chunk, dtype: str) -> None:
        self.path = contained(directory, chunk.entry.file)
        with self._open() as file:
            self.raw = locate(file.fileno(), chunk.entry, dtype=dtype, shape=chunk.box.sizes)
        self.nbytes = chunk.box.numel * ITEM_SIZES[dtype]
        self.crc = self.done = 0

    def __enter__(self) -> _ChunkReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = error is None and self.done == self.nbytes
        if complete and self.raw.crc is not None and self.crc != self.raw.crc:
            raise self._corrupt("its bytes have changed since they were written (CRC-32 differs).")

    def blocks(self, start: int, length: int) -> Iterator[memoryview]:
        """``length`` bytes from ``start``, which is where the last call ended."""
        buffer = memoryview(bytearray(min(_BLOCK, length)))
        with self._open() as file:
            while length:
                view = buffer[: min(len(buffer), length)]
                count = os.preadv(file.fileno(), [view], self.raw.position + start)
                if count == 0:
                    raise self._corrupt("the file ended while it was read.")
                if self.raw.crc is not None:
                    self.crc = crc32(view[:count], self.crc)
                yield view[:count]
                self.done += count
                start += count
                length -= count

    def _open(self) -> io.FileIO:
        # Opened for each run of bytes: a tensor may have more chunks than a process may have open files.
        return io.FileIO(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW))

    def _corrupt(self, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(what, where=str(self.path), fix="Use another checkpoint of the run.")


def _assembled(directory: Path, tensor: TensorEntry) -> Iterator[Block]:
    from lightning_swift.checkpoint.strips import assemble

    with ExitStack() as stack:
        readers = [stack.enter_context(_ChunkReader(directory, chunk, tensor.dtype)) for chunk in tensor.chunks]

        def read(index: int, start: int, length: int) -> bytes:
            return b"".join(map(bytes, readers[index].blocks(start, length)))

        boxes = [chunk.box for chunk in tensor.chunks]
        strides = [reader.raw.stride for reader in readers]
        size = ITEM_SIZES[tensor.dtype]
        yield from assemble(tensor.shape, boxes, strides, read, itemsize=size, strip_bytes=_STRIP)


def _full_rows(box: Box, shape: tuple[int, ...]) -> bool:
    return box.sizes[1:] == shape[1:]
