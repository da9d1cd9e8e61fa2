"""A tensor of which this process holds one run of elements, as torch.distributed.checkpoint saves and loads it.

ZeRO cuts parameters as flat vectors, wherever the cut falls. The run is described as boxes, views into the run itself,
so that nothing is gathered, copied or known about other ranks; a checkpoint of any other layout can be read into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from lightning_swift.checkpoint.boxes import Box, flat_boxes

__all__ = ["Pieces"]

_Run = Callable[[], Tensor]


class Pieces(torch.Tensor):
    """A handle of shape and dtype of the whole tensor; it has no values of its own and no operation works on it.

    Implements torch's protocol for tensors in checkpoints (``__create_write_items__`` and so on).

    Args:
        shape: Of the whole tensor.
        dtype: Of its elements.
        first: Index in the flattened tensor of the first element that is held here.
        length: Number of elements held here; 0 if there are none.
        run: Gives them as a flat tensor of ``length`` elements, the memory itself and no copy. Called whenever they
            are read or written, so they need not be in memory before.
    """

    @staticmethod
    def __new__(
        cls: type[Pieces], shape: Sequence[int], dtype: torch.dtype, *, first: int, length: int, run: _Run
    ) -> Pieces:
        """The handle; see the class."""
        # Not "meta", for which torch would put memory in its place before it loads.
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, *, first: int, length: int, run: _Run) -> None:
        self._boxes = tuple(flat_boxes(tuple(shape), first, first + length))
        self._run = run

    def parts(self) -> Iterator[tuple[Box, Tensor]]:
        """Where each part lies in the whole tensor, and a view of its values."""
        position = 0
        flat = self._run() if self._boxes else None
        for box in self._boxes:
            assert flat is not None
            yield box, flat.narrow(0, position, box.numel).view(box.sizes)
            position += box.numel

    @torch.no_grad()
    def take_from(self, whole: Tensor) -> None:
        """Copy what is held here from the whole tensor, converting its dtype."""
        for box, part in self.parts():
            part.copy_(whole[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))])

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for box, chunk in zip(self._boxes, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offset = () if index.offset is None else tuple(index.offset)
        return next(part for box, part in self.parts() if box.offsets == offset)

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a part of a tensor: take its parts(), or load the checkpoint that has it")

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = sum(box.numel for box in self._boxes)
        return f"Pieces({held} of {self.numel()} elements of {list(self.shape)}, {self.dtype})"
