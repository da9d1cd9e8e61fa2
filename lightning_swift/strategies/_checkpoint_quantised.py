"""Quantised weights as checkpoints describe them: how they were made, and whether they are those of a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_swift.adapters.quantise import is_quantised, quantisation_of, quantised_layers
from lightning_swift.checkpoint.pieces import Pieces

__all__ = ["describe_quantised", "is_same_quantised", "quantised_dtype"]


def describe_quantised(module: nn.Module, rename: Callable[[str], str]) -> dict[str, Any] | None:
    """What the manifest says about the quantised weights of ``module``; None if there are none.

    Raises:
        ModelError: They are of several kinds.
    """
    layers = quantised_layers(module)
    if not layers:
        return None
    first: Any = next(iter(layers.values())).weight
    state = getattr(first, "quant_state", None)
    return {
        "kind": quantisation_of(module),
        "double_quant": bool(state is not None and state.nested),
        "blocksize": None if state is None else int(state.blocksize),
        "dtype": str(quantised_dtype(next(iter(layers.values())), module)).removeprefix("torch."),
        "layers": {rename(f"{name}.weight"): list(_shape(layer)) for name, layer in layers.items()},
    }


def quantised_dtype(layer: nn.Module, module: nn.Module) -> torch.dtype:
    """The dtype that a weight was rounded to before it was quantised, and has when it is used.

    Args:
        layer: Of bitsandbytes.
        module: The whole model: 8-bit layers do not know, and have the dtype of the frozen weights beside them.
    """
    state = getattr(layer.weight, "quant_state", None)
    if state is not None:
        dtype: torch.dtype = state.dtype
        return dtype
    plain = (p for p in module.parameters() if not p.requires_grad and p.is_floating_point() and not is_quantised(p))
    return next((parameter.dtype for parameter in plain), torch.float16)


def is_same_quantised(layer: nn.Module, value: Any, module: nn.Module, whole: Callable[[], Tensor]) -> bool:
    """Whether a quantised weight is what ``whole()`` gives when it is quantised in the same way.

    Args:
        layer: Of bitsandbytes.
        value: Its packed weight, or this rank's part of it.
        module: The whole model.
        whole: Reads the matrix ``[out, in]``.
    """
    import bitsandbytes as bnb

    weight: Any = layer.weight
    parts = list(value.parts()) if isinstance(value, Pieces) else [(None, value.detach())]
    if not parts:
        return True
    device = parts[0][1].device
    state = getattr(weight, "quant_state", None)
    if state is None:
        rounded = whole().to(quantised_dtype(layer, module)).to(device, torch.float16)
        packed, scales, _ = bnb.functional.int8_vectorwise_quant(rounded)
        own: Any = weight.SCB if weight.SCB is not None else layer.state.SCB  # type: ignore[union-attr]
    else:
        packed, made = bnb.functional.quantize_4bit(
            whole().to(device, state.dtype).contiguous(),
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=parts[0][1].dtype,
        )
        scales, own = made.absmax, state.absmax
    same = [_equals(packed, box, part) for box, part in parts]
    return all(same) and torch.equal(scales.to(own.device), own)


def _equals(packed: Tensor, box: Any, part: Tensor) -> bool:
    wanted = packed if box is None else packed[tuple(slice(o, e) for o, e in zip(box.offsets, box.ends, strict=True))]
    # As bytes: packed values read as floats may be NaN.
    return torch.equal(_bytes(wanted), _bytes(part))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _shape(layer: Any) -> tuple[int, int]:
    return int(layer.out_features), int(layer.in_features)
