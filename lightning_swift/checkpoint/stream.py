"""Streams a tensor of a checkpoint in row-major order, however it was sharded, within a few megabytes of memory."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from lightning_swift.checkpoint.boxes import Box
from lightning_swift.checkpoint.distcp import Chunk, RawTensor, TensorEntry, locate
from lightning_swift.checkpoint.dtypes import ITEM_SIZES, Block
from lightning_swift.checkpoint.layout import contained
from lightning_swift.errors import CheckpointCorruptError

__all__ = ["Shards"]

# 256 KiB stays in a core's second-level cache; 8 MiB blocks were four times slower.
_BLOCK = 1 << 18
# Working memory for tensors that are not split along their first axis alone.
_STRIP = 1 << 22
_OPEN_FILES = 64


class Shards:
    """The ``.distcp`` files of one checkpoint, opened when needed; a context manager that closes them.

    Args:
        directory: A checkpoint whose names have been checked.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[str, int] = OrderedDict()
        self._block = bytearray(_BLOCK)
        self._view = memoryview(self._block)

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def stream(self, tensor: TensorEntry) -> Iterator[Block]:
        """The bytes of ``tensor`` in row-major order; each block is valid until the next one is asked for.

        Raises:
            CheckpointCorruptError: An archive does not hold what ``.metadata`` says, or a file ends too soon.
        """
        raws = [self._locate(chunk, tensor.dtype) for chunk in tensor.chunks]
        if all(_full_rows(chunk.box, tensor.shape) for chunk in tensor.chunks) and all(r.stride is None for r in raws):
            size = ITEM_SIZES[tensor.dtype]
            for chunk, raw in zip(tensor.chunks, raws, strict=True):
                yield from self._run(chunk.entry.file, raw.position, chunk.box.numel * size)
        else:
            yield from self._assembled(tensor, raws)

    def read(self, tensor: TensorEntry) -> bytes:
        """All bytes of ``tensor`` at once."""
        return b"".join(bytes(block) for block in self.stream(tensor))

    def _locate(self, chunk: Chunk, dtype: str) -> RawTensor:
        return locate(self._file(chunk.entry.file), chunk.entry, dtype=dtype, shape=chunk.box.sizes)

    def _run(self, file: str, position: int, length: int) -> Iterator[memoryview]:
        descriptor = self._file(file)
        while length:
            count = os.preadv(descriptor, [self._view[: min(length, _BLOCK)]], position)
            if count == 0:
                raise CheckpointCorruptError("the file ended while it was read.", where=str(self.directory / file))
            yield self._view[:count]
            position += count
            length -= count

    def _assembled(self, tensor: TensorEntry, raws: list[RawTensor]) -> Iterator[Block]:
        from lightning_swift.checkpoint.strips import assemble

        def read(index: int, start: int, length: int) -> bytes:
            chunk, raw = tensor.chunks[index], raws[index]
            return b"".join(bytes(part) for part in self._run(chunk.entry.file, raw.position + start, length))

        boxes = [chunk.box for chunk in tensor.chunks]
        strides = [raw.stride for raw in raws]
        size = ITEM_SIZES[tensor.dtype]
        yield from assemble(tensor.shape, boxes, strides, read, itemsize=size, strip_bytes=_STRIP)

    def _file(self, name: str) -> int:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        if len(self._open) >= _OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        self._open[name] = os.open(contained(self.directory, name), os.O_RDONLY | os.O_NOFOLLOW)
        return self._open[name]


def _full_rows(box: Box, shape: tuple[int, ...]) -> bool:
    return box.sizes[1:] == shape[1:] and math.prod(box.sizes) > 0
