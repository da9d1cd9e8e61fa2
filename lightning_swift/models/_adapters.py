"""First values of what adapters add to a lazy model, by parts, once the weights beside them have been read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.adapters.dora import magnitudes, row_norms
from lightning_swift.adapters.initial import initial_adapter_values
from lightning_swift.adapters.quantise import is_quantised

__all__ = ["Part", "Region", "adapter_parts"]

# Offsets and sizes of a part of a tensor, and what gives the values of any such part.
Region = tuple[tuple[int, ...], tuple[int, ...]]
Part = Callable[[Region], Tensor]
# What reads parts of the tensor of that name from the folder, in that dtype; with the whole tensor's shape.
_FolderPart = Callable[[str, torch.dtype], tuple[Part, tuple[int, ...]]]


def adapter_parts(model: nn.Module, read: _FolderPart, device: torch.device) -> Iterator[tuple[str, Part]]:
    """Name and values of every adapter parameter below ``model``, a Hugging Face model inside its peft wrapper.

    Matrices are drawn. Magnitudes of DoRA are norms of rows of the base weight: of its own values where it is
    quantised, else of those in the folder, since a rank may hold only a part of each row.

    Raises:
        ModelError: The adapter's initialisation needs the weights in a way that is not supported.
    """
    for name, value in initial_adapter_values(model):
        yield name, _cut(value, device)
    for name, layer, transposed in magnitudes(model):
        base: Any = model.get_submodule(layer).get_base_layer()  # type: ignore[operator]
        if is_quantised(base.weight):
            yield name, _cut(row_norms(base.dequantize(), transposed=transposed), device)
        else:
            yield name, _norms(*read(f"{layer}.weight", base.weight.dtype), transposed=transposed)


def _cut(whole: Tensor, device: torch.device) -> Part:
    def cut(region: Region) -> Tensor:
        part = whole[tuple(slice(o, o + n) for o, n in zip(*region, strict=True))]
        return part.to(device=device, copy=True).contiguous()

    return cut


def _norms(weight: Part, shape: tuple[int, ...], *, transposed: bool) -> Part:
    def norms(region: Region) -> Tensor:
        ((first,), (count,)) = region
        rows = ((0, first), (shape[0], count)) if transposed else ((first, 0), (count, shape[1]))
        return row_norms(weight(rows), transposed=transposed)

    return norms
