"""Fills what a checkpoint left to its pretrained folder, and what it holds packed, into the model of an export's check.

By the libraries' own readers and kernels, whole tensors at once: nothing here is shared with the merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swift.checkpoint.layout import MODEL_PREFIX, Manifest

__all__ = ["FrozenParts"]


class FrozenParts:
    """The tensors of a model that do not simply lie in the checkpoint.

    Args:
        manifest: Of the checkpoint.
        state: Every tensor of the model by its key in the checkpoint; the ones that are dealt with here are taken out,
            and what is to be read instead is put in.
        stored: Every name in the checkpoint with shape and dtype.
    """

    def __init__(
        self,
        manifest: Manifest,
        state: dict[str, Tensor],
        stored: Mapping[str, tuple[torch.Size, torch.dtype] | None],
    ) -> None:
        self._manifest = manifest
        self._layers = {} if manifest.quantization is None else manifest.quantization["layers"]
        left_out = {} if manifest.base is None else manifest.base.tensors
        self._from_folder = {n: state.pop(k) for n in left_out if (k := f"{MODEL_PREFIX}{n}") in state}
        self._packed = {n: state.pop(k) for n in self._layers if (k := f"{MODEL_PREFIX}{n}") in state}
        for name in self._packed:
            key = f"{MODEL_PREFIX}{name}"
            beside = (f"{key}.", f"{key.removesuffix('weight')}SCB", f"{key.removesuffix('weight')}weight_format")
            for part, entry in stored.items():
                if entry is not None and (part == key or part.startswith(beside)):
                    state[part] = torch.empty(entry[0], dtype=entry[1])

    def fill(self, state: dict[str, Tensor], base: Path | None) -> None:
        """Give them their values.

        Args:
            state: With what has been read from the checkpoint; they are put back into it.
            base: The verified pretrained folder.
        """
        for name, target in self._packed.items():
            target.copy_(self._unpacked(f"{MODEL_PREFIX}{name}", state))
        if self._from_folder and base is not None:
            self._read_folder(base)
        state.update({f"{MODEL_PREFIX}{name}": value for name, value in (self._packed | self._from_folder).items()})

    def _read_folder(self, folder: Path) -> None:
        from safetensors import safe_open

        assert self._manifest.base is not None
        found: dict[str, dict[int, Tensor]] = {}
        for file in self._manifest.base.files:
            if not file.endswith(".safetensors"):
                continue
            with safe_open(folder / file, framework="pt") as handle:
                held = set(handle.keys())
                for name, target in self._from_folder.items():
                    record = self._manifest.base.tensors[name]
                    names = record.parts or (record.name,)
                    pieces = {index: handle.get_tensor(part) for index, part in enumerate(names) if part in held}
                    found[name] = found.get(name, {}) | pieces
                    if pieces and len(found[name]) == len(names):
                        self._put(name, target, found.pop(name), getattr(torch, record.dtype))

    def _put(self, name: str, target: Tensor, pieces: Mapping[int, Tensor], dtype: torch.dtype) -> None:
        whole = pieces[0] if len(pieces) == 1 else torch.cat([pieces[index].flatten() for index in sorted(pieces)])
        values = whole.to(dtype).view(target.shape)
        target.copy_(self._rounded(values) if name in self._layers else values)

    def _rounded(self, matrix: Tensor) -> Tensor:
        """What a matrix becomes by being quantised and de-quantised."""
        from bitsandbytes import functional

        quantization: Mapping[str, Any] = self._manifest.quantization or {}
        if quantization["kind"] == "int8":
            codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
            values: Tensor = functional.int8_vectorwise_dequant(codes, scales)
        else:
            packed, made = functional.quantize_4bit(
                matrix.contiguous(),
                blocksize=quantization["blocksize"],
                compress_statistics=quantization["double_quant"],
                quant_type=quantization["kind"],
            )
            values = functional.dequantize_4bit(packed, made)
        return values

    def _unpacked(self, key: str, state: Mapping[str, Tensor]) -> Tensor:
        from bitsandbytes import functional

        scales = state.get(f"{key.removesuffix('weight')}SCB")
        if scales is not None:
            values: Tensor = functional.int8_vectorwise_dequant(state[key], scales)
            return values
        parts = {name.removeprefix(f"{key}."): value for name, value in state.items() if name.startswith(f"{key}.")}
        made = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
        matrix: Tensor = functional.dequantize_4bit(state[key], made)
        return matrix
