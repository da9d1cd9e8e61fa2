"""Adds LoRA adapters to the weights they adapt, with numpy alone: product in float64, one rounding at the end.

Understands peft's names for LoRA on linear, convolution-as-linear (GPT-2) and embedding layers, rank-stabilised
scaling, rank and alpha patterns, DoRA, and modules that were trained whole. Anything else is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_swift.checkpoint.casting import as_float64, from_float64
from lightning_swift.checkpoint.dtypes import FLOATS, ITEM_SIZES, Block
from lightning_swift.checkpoint.selection import Weight
from lightning_swift.errors import ExportError

__all__ = ["AdaptedWeight", "adapted_weights", "only_adapter", "with_all_targets"]

_FIX = "Export the adapter instead (--format adapter)."
# Options that change the formula of the merge and that it does not know; each is harmless at these values.
_UNSUPPORTED = (
    *("lora_bias", "layer_replication", "megatron_config", "use_qalora", "use_bdlora", "target_parameters"),
    *("trainable_token_indices", "alora_invocation_tokens", "kasa_config", "monteclora_config"),
)
_STRIP_ELEMENTS = 1 << 17

Stream = Callable[[Weight], Iterable[Block]]


@dataclass(frozen=True)
class AdaptedWeight:
    """One weight of the merged model, with the LoRA factors to add to it if it has any.

    Args:
        base: The frozen weight.
        a: Factor of shape ``[r, in]`` and ``b`` of ``[out, r]``; None for a weight that no adapter changes.
        scale: Factor of the product.
        transposed: The weight has shape ``[in, out]``.
        magnitude: DoRA's norms of shape ``[out]``, or None.
    """

    base: Weight
    a: Weight | None = None
    b: Weight | None = None
    scale: float = 0.0
    transposed: bool = False
    magnitude: Weight | None = None

    def blocks(self, stream: Stream, target: str) -> Iterator[Block]:
        """The merged weight in ``target`` dtype, a strip of rows at a time; each block is valid until the next."""
        if self.a is None or self.b is None:
            raise ValueError("this weight has no adapter")
        a, b = (_values(stream, factor).reshape(factor.shape) for factor in (self.a, self.b))
        left, right = (a.T, b.T) if self.transposed else (b, a)
        norms = None if self.magnitude is None else _values(stream, self.magnitude)
        rows, columns = self.base.shape
        step = max(1, _STRIP_ELEMENTS // max(1, columns))
        row_bytes = columns * ITEM_SIZES[self.base.dtype]
        for start, block in zip(range(0, rows, step), _regroup(stream(self.base), step * row_bytes), strict=True):
            strip = as_float64(block, self.base.dtype).reshape(-1, columns)
            strip += self.scale * (left[start : start + len(strip)] @ right)
            if norms is not None:
                length = np.sqrt(np.square(strip).sum(axis=1, keepdims=True))
                strip *= norms[start : start + len(strip), None] / length
            yield from_float64(strip, target, where=self.base.name)


def only_adapter(adapters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and peft config of the one adapter of a checkpoint.

    Raises:
        ExportError: There is none, or there are several.
    """
    if not adapters:
        raise ExportError(
            "the checkpoint holds no adapter: all weights were trained, or the adapters had been merged.",
            fix="Export the model (--format safetensors).",
        )
    if len(adapters) != 1:
        raise ExportError(f"the checkpoint holds {len(adapters)} adapters.", where=", ".join(adapters), fix=_FIX)
    ((name, config),) = adapters.items()
    if not isinstance(config, dict):
        raise ExportError("the adapter's config is no JSON object.", where=name)
    return name, config


def with_all_targets(adapters: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The same peft configs, whose lists of adapted layers name every layer that has factors among ``names``.

    Asked for all linear layers, peft lists those that it finds, which under pipeline stages are those of one stage.

    Args:
        adapters: peft's configs by adapter name.
        names: Of all tensors of the checkpoint.
    """
    stored = list(names)
    completed: dict[str, Any] = {}
    for adapter, config in adapters.items():
        targets = config.get("target_modules")
        completed[adapter] = config
        if isinstance(targets, list):
            pattern = re.compile(
                rf".*\bbase_model\.model\.(.+)\.lora_(?:embedding_)?A\.{re.escape(adapter)}(?:\.weight)?"
            )
            layers = {match[1] for name in stored if (match := pattern.fullmatch(name))}
            # As peft compares them: the whole name, or the end of it.
            others = [layer for layer in layers if not any(f".{layer}".endswith(f".{target}") for target in targets)]
            completed[adapter] = {**config, "target_modules": sorted([*targets, *others])}
    return completed


def adapted_weights(tensors: Mapping[str, Weight], adapters: Mapping[str, Any]) -> dict[str, AdaptedWeight]:
    """The weights of the merged model by its own names.

    Args:
        tensors: Tensors of a peft model by the names inside the model it wraps.
        adapters: peft's configs by adapter name.

    Raises:
        ExportError: A kind of adapter that is not understood, or a base weight that is not in the checkpoint.
    """
    adapter, config = only_adapter(adapters)
    _refuse_unknown(config, adapter)
    merged: dict[str, AdaptedWeight] = {}
    factors: dict[str, dict[str, Weight]] = {}
    for name, tensor in tensors.items():
        module, part = _split(name, adapter)
        if part is None:
            merged.setdefault(module, AdaptedWeight(tensor))
        elif part == "trained":
            merged[module] = AdaptedWeight(tensor)
        elif part != "replaced":
            factors.setdefault(module, {})[part] = tensor
    for module, parts in factors.items():
        weight = merged.get(f"{module}.weight")
        if weight is None:
            raise ExportError("the base weight of this adapter is not in the checkpoint.", where=module, fix=_FIX)
        merged[f"{module}.weight"] = _adapt(module, weight.base, parts, config)
    return merged


_PARTS = {"lora_A": "a", "lora_B": "b", "lora_magnitude_vector": "m"}
_EMBEDDING_PARTS = {"lora_embedding_A": "embedding_a", "lora_embedding_B": "embedding_b"}


def _split(name: str, adapter: str) -> tuple[str, str | None]:
    """``(name, None)`` for a weight of the base, else the module and what the tensor is to it."""
    if ".base_layer." in name:
        return name.replace(".base_layer.", "."), None
    if f".modules_to_save.{adapter}." in name:
        return name.replace(f".modules_to_save.{adapter}.", "."), "trained"
    if ".original_module." in name:
        return name, "replaced"
    match = re.fullmatch(rf"(?P<module>.+)\.(?P<part>lora_\w+)\.{re.escape(adapter)}(?P<weight>\.weight)?", name)
    if match is None:
        if ".lora_" in name:
            raise ExportError("this tensor of an adapter is not understood.", where=name, fix=_FIX)
        return name, None
    part = {**_PARTS, **_EMBEDDING_PARTS}.get(match["part"])
    if part is None:
        raise ExportError("this tensor of an adapter is not understood.", where=name, fix=_FIX)
    return match["module"], part


def _refuse_unknown(config: Mapping[str, Any], adapter: str) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ExportError(f"merging adapters of type {kind!r} is not supported.", where=adapter, fix=_FIX)
    for option in _UNSUPPORTED:
        if config.get(option):
            raise ExportError(f"merging LoRA with {option} is not supported.", where=adapter, fix=_FIX)


def _adapt(module: str, base: Weight, parts: Mapping[str, Weight], config: Mapping[str, Any]) -> AdaptedWeight:
    embedding = "embedding_a" in parts
    a, b = parts.get("embedding_a" if embedding else "a"), parts.get("embedding_b" if embedding else "b")
    transposed = embedding or bool(config.get("fan_in_fan_out"))
    if a is None or b is None or len(a.shape) != 2 or len(base.shape) != 2 or base.dtype not in FLOATS:
        raise ExportError("only LoRA on matrices can be merged.", where=module, fix=_FIX)
    product = (b.shape[0], a.shape[1])
    if a.shape[0] != b.shape[1] or base.shape != (product[::-1] if transposed else product):
        raise ExportError(f"the factors make {list(product)} of {list(base.shape)}.", where=module, fix=_FIX)
    magnitude = parts.get("m")
    if magnitude is not None and (transposed or magnitude.shape != (base.shape[0],)):
        raise ExportError("DoRA on this layer cannot be merged.", where=module, fix=_FIX)
    return AdaptedWeight(base, a, b, _scale(module, a.shape[0], config), transposed, magnitude)


def _scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    patterns = config.get("alpha_pattern") or {}
    # The first pattern that matches the end of the module's name, as peft takes it.
    matches = (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module))
    alpha = float(next(matches, config.get("lora_alpha", rank)))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _values(stream: Stream, tensor: Weight) -> NDArray[np.float64]:
    return as_float64(b"".join(map(bytes, stream(tensor))), tensor.dtype)


def _regroup(blocks: Iterable[Block], size: int) -> Iterator[Block]:
    """The same bytes in blocks of ``size``; the last one may be shorter."""
    pending = bytearray()
    for block in blocks:
        pending += block
        while len(pending) >= size:
            yield bytes(memoryview(pending)[:size])
            del pending[:size]
    if pending:
        yield bytes(pending)
