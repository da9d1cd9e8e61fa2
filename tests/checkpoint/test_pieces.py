"""Runs of elements of a flattened tensor, described as boxes, saved and read in other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.checkpoint.boxes import check_cover, flat_boxes
from lightning_swift.checkpoint.distcp import read_index
from lightning_swift.checkpoint.pieces import Pieces
from lightning_swift.checkpoint.sharded import load_into
from lightning_swift.checkpoint.stream import read_tensor
from tests.harness.checkpoints import save_checkpoint
from tests.harness.ranks import ranks

SHAPES = [(), (5,), (3, 4), (2, 3, 4), (1, 3), (4, 1), (2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_hold_the_elements_of_a_flat_range_in_order(shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    whole = torch.arange(count).reshape(shape)
    for start in range(count + 1):
        for stop in range(start, count + 1):
            parts = [
                whole[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))].reshape(-1)
                for box in flat_boxes(shape, start, stop)
            ]
            assert [int(x) for part in parts for x in part] == list(range(start, stop))
            assert all(part.numel() for part in parts)
        both = [*flat_boxes(shape, 0, start), *flat_boxes(shape, start, count)]
        check_cover(shape, sorted(both, key=lambda box: box.offsets), where="here")


def piece(whole: Tensor, first: int, length: int) -> Pieces:
    run = whole.reshape(-1)[first : first + length].clone()
    return Pieces(whole.shape, whole.dtype, first=first, length=length, run=lambda: run)


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


CUTS: Sequence[Sequence[int]] = [(0, 60, 60), (0, 7, 60), (0, 31, 60), (0, 60), (0, 0, 60)]


@ranks(2)
def _round_trip(folder: str) -> None:
    whole = values(3, 4, 5)
    rank = dist.get_rank()
    for number, cut in enumerate(CUTS):
        bounds = [*cut, 60][:3]
        path = Path(folder) / f"{number}.ckpt"
        save_checkpoint(path, {"model.w": piece(whole, bounds[rank], bounds[rank + 1] - bounds[rank])})
        for other in CUTS:
            ends = [*other, 60][:3]
            target = piece(torch.zeros_like(whole), ends[rank], ends[rank + 1] - ends[rank])
            load_into(path, {"model.w": target}, strict=True)
            for box, part in target.parts():
                assert torch.equal(part, whole[tuple(slice(*b) for b in zip(box.offsets, box.ends, strict=True))])
        plain = torch.zeros_like(whole)
        load_into(path, {"model.w": plain}, strict=True)
        assert torch.equal(plain, whole)


def test_any_cut_is_read_into_any_other_and_into_a_whole_tensor(tmp_path: Path) -> None:
    _round_trip(str(tmp_path))
    for number in range(len(CUTS)):
        path = tmp_path / f"{number}.ckpt"
        data = read_tensor(path, read_index(path).tensors["model.w"])
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(3, 4, 5), values(3, 4, 5))


def test_a_part_takes_its_own_from_a_whole_tensor_and_converts_it() -> None:
    target = piece(torch.zeros(4, 3, dtype=torch.bfloat16), 2, 7)
    target.take_from(torch.arange(12.0).view(4, 3))
    assert [float(x) for _, part in target.parts() for x in part.reshape(-1)] == [float(x) for x in range(2, 9)]


def test_no_operation_takes_a_part_for_a_whole() -> None:
    target = piece(values(4, 3), 0, 5)
    assert (tuple(target.shape), target.dtype) == ((4, 3), torch.float32)
    assert repr(target) == "Pieces(5 of 12 elements of [4, 3], torch.float32)"
    with pytest.raises(NotImplementedError, match="part of a tensor"):
        target + 1
