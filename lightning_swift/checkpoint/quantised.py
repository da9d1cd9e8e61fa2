"""De-quantises the base weights of a checkpoint, layer by layer: the one part of a merge that needs torch.

A layer that was left to the pretrained folder is quantised again, as the training run did, and de-quantised; one that
lies packed in the checkpoint is de-quantised. Either way the result is what the layer has computed with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_swift.checkpoint.base import BaseEntry
from lightning_swift.checkpoint.distcp import TensorEntry
from lightning_swift.checkpoint.dtypes import Block
from lightning_swift.checkpoint.stream import read_tensor
from lightning_swift.errors import ExportError

if TYPE_CHECKING:
    import torch

__all__ = ["DequantisedEntry", "dequantised"]

_BLOCK = 1 << 20
# A writer's threads would each hold a whole layer in several forms.
_ONE_AT_A_TIME = threading.Lock()
_KINDS = ("nf4", "fp4", "int8")


@dataclass(frozen=True)
class DequantisedEntry:
    """One quantised weight as the matrix it stands for.

    Args:
        name: Of the parameter.
        shape: ``[out, in]``.
        kept: Dtype to write it in if no other is asked for: that of the model it was quantised from.
        make: Gives the matrix in float32.
        dtype: Dtype of the elements in the stream.
    """

    name: str
    shape: tuple[int, ...]
    kept: str
    make: Callable[[], torch.Tensor]
    dtype: str = "float32"

    def stream(self) -> Iterator[Block]:
        """The elements in row-major order, in float32."""
        with _ONE_AT_A_TIME:
            matrix = self.make().contiguous()
        array: Any = matrix.view(-1).numpy()
        data = memoryview(array).cast("B")
        yield from (data[start : start + _BLOCK] for start in range(0, len(data), _BLOCK))


def dequantised(
    weights: Mapping[str, TensorEntry | BaseEntry], quantization: Mapping[str, Any], checkpoint: Path
) -> dict[str, TensorEntry | BaseEntry | DequantisedEntry]:
    """``weights`` with every quantised one as its matrix, and without what describes how they are packed.

    Args:
        weights: By the names under which the checkpoint has them.
        quantization: Of the manifest.
        checkpoint: The directory, for what lies packed in it.

    Raises:
        ExportError: A kind of quantisation that is not known.
    """
    if quantization.get("kind") not in _KINDS:
        raise ExportError(f"a base quantised as {quantization.get('kind')!r} is not understood.", where=str(checkpoint))
    found: dict[str, TensorEntry | BaseEntry | DequantisedEntry] = dict(weights)
    for name, shape in quantization["layers"].items():
        parts = _take_parts(name, found)
        source = found.pop(name, None)
        if isinstance(source, BaseEntry):
            make = partial(_from_folder, source, quantization)
        elif isinstance(source, TensorEntry):
            make = partial(_from_packed, source, parts, checkpoint, quantization)
        else:
            continue
        found[name] = DequantisedEntry(name, tuple(shape), quantization["dtype"], make)
    return found


def _take_parts(name: str, weights: dict[str, Any]) -> dict[str, TensorEntry]:
    """The entries that say how ``name`` is packed, by their own last names."""
    prefix, layer = f"{name}.", name.removesuffix("weight")
    parts = {key.removeprefix(prefix): weights.pop(key) for key in [key for key in weights if key.startswith(prefix)]}
    for own in ("SCB", "weight_format"):
        if f"{layer}{own}" in weights:
            parts[own] = weights.pop(f"{layer}{own}")
    return parts


def _from_folder(source: BaseEntry, quantization: Mapping[str, Any]) -> torch.Tensor:
    import torch
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    from lightning_swift.adapters.quantise import dequantised_weight, quantised_weight

    whole = _tensor(b"".join(map(bytes, replace(source, dtype=source.stored).stream())), source.stored, source.shape)
    sizes = {"input_features": source.shape[1], "output_features": source.shape[0], "bias": False}
    layer: Any
    if quantization["kind"] == "int8":
        layer = Linear8bitLt(**sizes, has_fp16_weights=False, device=torch.device("meta"))
    else:
        layer = Linear4bit(
            **sizes,
            compress_statistics=quantization["double_quant"],
            quant_type=quantization["kind"],
            device=torch.device("meta"),
        )
        layer.weight.blocksize = quantization["blocksize"]
    layer.weight.data = layer.weight.data.to(getattr(torch, quantization["dtype"]))
    layer.weight = quantised_weight(layer.weight, whole)
    return dequantised_weight(layer)


def _from_packed(
    source: TensorEntry, parts: Mapping[str, TensorEntry], checkpoint: Path, quantization: Mapping[str, Any]
) -> torch.Tensor:
    import torch
    from bitsandbytes.functional import QuantState, dequantize_4bit, int8_vectorwise_dequant

    packed = _tensor(read_tensor(checkpoint, source), source.dtype, source.shape)
    held = {name: _tensor(read_tensor(checkpoint, part), part.dtype, part.shape) for name, part in parts.items()}
    if quantization["kind"] == "int8":
        values: torch.Tensor = int8_vectorwise_dequant(packed, held["SCB"])
    else:
        values = dequantize_4bit(packed, QuantState.from_dict(held, device=torch.device("cpu")))
    return values.to(torch.float32)


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)
