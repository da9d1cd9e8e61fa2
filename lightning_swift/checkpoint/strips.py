"""Assembles a tensor from boxes strip by strip: for layouts that are not plain runs of rows (tensor parallelism)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lightning_swift.checkpoint.boxes import Box
from lightning_swift.checkpoint.dtypes import Block

__all__ = ["assemble"]

_Read = Callable[[int, int, int], bytes]


def assemble(
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    strides: Sequence[tuple[int, ...] | None],
    read: _Read,
    *,
    itemsize: int,
    strip_bytes: int,
) -> Iterator[Block]:
    """Yield the bytes of a tensor of ``shape`` in row-major order.

    Args:
        shape: Global shape of at least one axis; ``boxes`` cover it exactly.
        boxes: Where each chunk lies in the tensor.
        strides: Stride of each chunk in elements, None for row-major. Only a chunk with a stride is read whole.
        read: ``read(chunk, start, length)`` gives bytes of one chunk; each byte is asked for once, in order.
        itemsize: Bytes per element.
        strip_bytes: About how many bytes to assemble at a time.
    """
    cell = np.dtype(f"u{itemsize}" if itemsize <= 8 else f"V{itemsize}")
    whole: dict[int, np.ndarray] = {}
    for index, (box, stride) in enumerate(zip(boxes, strides, strict=True)):
        if stride is not None:
            whole[index] = _strided(index, box, stride, read, cell)
    for low, high in _strips(shape, strip_bytes // itemsize):
        strip = np.empty([stop - start for start, stop in zip(low, high, strict=True)], cell)
        for index, box in enumerate(boxes):
            start = tuple(map(max, low, box.offsets))
            stop = tuple(map(min, high, box.ends))
            if all(a < b for a, b in zip(start, stop, strict=True)):
                target = tuple(slice(a - o, b - o) for a, b, o in zip(start, stop, low, strict=True))
                local = [(a - o, b - o) for a, b, o in zip(start, stop, box.offsets, strict=True)]
                window = tuple(slice(a, b) for a, b in local)
                strip[target] = whole[index][window] if index in whole else _part(index, box, local, read, cell)
        yield strip.reshape(-1).view(np.uint8).data


def _strips(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes ``(low, high)`` in row-major order of at most ``limit`` elements, each one contiguous in the tensor."""
    axis = 0
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    inner = max(1, math.prod(shape[axis + 1 :]))
    rows = max(1, limit // inner)
    for outer in np.ndindex(*shape[:axis]):
        for row in range(0, shape[axis], rows):
            low = (*outer, row, *(0 for _ in shape[axis + 1 :]))
            high = (*(i + 1 for i in outer), min(row + rows, shape[axis]), *shape[axis + 1 :])
            yield low, high


def _strided(index: int, box: Box, stride: tuple[int, ...], read: _Read, cell: np.dtype) -> np.ndarray:
    """The whole of a chunk that does not lie in row-major order."""
    span = 1 + sum((n - 1) * step for n, step in zip(box.sizes, stride, strict=True))
    data = np.frombuffer(read(index, 0, span * cell.itemsize), cell)
    return np.lib.stride_tricks.as_strided(data, box.sizes, [step * cell.itemsize for step in stride])


def _part(index: int, box: Box, local: list[tuple[int, int]], read: _Read, cell: np.dtype) -> np.ndarray:
    """The elements ``local`` (start and stop per axis, relative to the chunk) of a row-major chunk.

    A strip is contiguous in the tensor, so its share of a chunk is: single indices on the leading axes, one range of
    rows, and all of the axes after it.
    """
    axis = next((i for i, (a, b) in enumerate(local) if b - a > 1), len(local) - 1)
    inner = math.prod(box.sizes[axis + 1 :])
    first = sum(a * math.prod(box.sizes[i + 1 :]) for i, (a, _) in enumerate(local[: axis + 1]))
    rows = local[axis][1] - local[axis][0]
    data = np.frombuffer(read(index, first * cell.itemsize, rows * inner * cell.itemsize), cell)
    return data.reshape([*(1 for _ in local[:axis]), rows, *box.sizes[axis + 1 :]])
