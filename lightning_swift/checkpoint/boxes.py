"""Boxes of a tensor and whether they cover it exactly, without holes or overlaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_swift.errors import CheckpointCorruptError

__all__ = ["Box", "check_cover", "flat_boxes"]


@dataclass(frozen=True)
class Box:
    """The elements ``offsets[i] <= index[i] < offsets[i] + sizes[i]`` of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index on each axis."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a flattened (row-major) tensor as boxes, in that order.

    Each box is contiguous in the flattened tensor. A range that begins and ends with whole rows is one box.

    Args:
        shape: Of the tensor.
        start: Index of the first element.
        stop: One past the last element, not beyond the end of the tensor.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, begin = divmod(start, row)
    last, end = divmod(stop, row)
    if begin:
        edge = min(row, stop - first * row)
        yield from _in_row(first, shape, begin, edge)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if end and first <= last:
        yield from _in_row(last, shape, 0, end)


def _in_row(row: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def check_cover(shape: tuple[int, ...], boxes: Sequence[Box], *, where: str) -> None:
    """Check that non-empty ``boxes``, sorted by offset, cover a tensor of ``shape`` exactly once.

    Raises:
        CheckpointCorruptError: They leave a hole, overlap, or stick out.
    """
    rank = len(shape)
    for box in boxes:
        fits = len(box.offsets) == len(box.sizes) == rank and all(e <= s for e, s in zip(box.ends, shape, strict=True))
        if not fits:
            raise _bad(f"a chunk of {list(box.sizes)} at {list(box.offsets)} sticks out of {list(shape)}.", where)
    if sum(box.numel for box in boxes) != math.prod(shape):
        raise _bad(f"the chunks leave holes in {list(shape)} or overlap.", where)
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if rank and other.offsets[0] >= box.ends[0]:
                break  # sorted by offset: no later box can reach back
            if _overlap(box, other):
                raise _bad(f"chunks at {list(box.offsets)} and {list(other.offsets)} overlap.", where)


def _overlap(a: Box, b: Box) -> bool:
    return all(
        a_start < b_end and b_start < a_end
        for a_start, a_end, b_start, b_end in zip(a.offsets, a.ends, b.offsets, b.ends, strict=True)
    )


def _bad(what: str, where: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(what, where=where, fix="Use another checkpoint of the run.")
