"""Casts between floating dtypes with numpy alone, block by block: round to nearest even, NaN stays NaN.

Equal to torch's casts bit for bit (NaN payloads aside). The scratch arrays of a caster are reused, so a block costs no
allocation. Importing this module imports numpy (0.1 s); a merge without a cast does not need it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_swift.checkpoint.dtypes import Block
from lightning_swift.errors import ExportError

__all__ = ["Caster", "as_float64", "from_float64"]

F32: TypeAlias = NDArray[np.float32]
U16: TypeAlias = NDArray[np.uint16]
U32: TypeAlias = NDArray[np.uint32]

_NUMPY: dict[str, type[np.floating[Any]]] = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_QUIET_NAN = np.uint16(0x7FC0)


class Caster:
    """``caster(block)`` gives the elements of ``block`` in dtype ``target``.

    Args:
        source: Dtype of the elements in the blocks, one of :data:`~lightning_swift.checkpoint.dtypes.FLOATS`.
        target: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        where: The tensor, for error messages.
    """

    def __init__(self, source: str, target: str, *, where: str) -> None:
        self.source, self.target, self.where = source, target, where
        self._bits: U32 = np.empty(0, np.uint32)
        self._mask: NDArray[np.bool_] = np.empty(0, np.bool_)
        self._narrow: U16 = np.empty(0, np.uint16)
        self._wide: F32 = np.empty(0, np.float32)

    def __call__(self, block: Block) -> Block:
        """Cast one block; the result is valid until the next call."""
        # By way of float32, as torch does it: exact for the 16-bit dtypes, rounded once more for float64.
        wide = self._to_float32(block)
        if self.target == "bfloat16":
            return self._to_bfloat16(wide).data
        if self.target == "float16":
            return self._to_float16(wide).data
        return wide.data

    def _to_float32(self, block: Block) -> F32:
        if self.source == "float32":
            return np.frombuffer(block, np.float32)
        if self.source == "bfloat16":
            half = np.frombuffer(block, np.uint16)
            wide = self._wide_scratch(half.size)
            bits = wide.view(np.uint32)
            np.copyto(bits, half)
            np.left_shift(bits, np.uint32(16), out=bits)
            return wide
        values = np.frombuffer(block, _NUMPY[self.source])
        wide = self._wide_scratch(values.size)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.copyto(wide, values, casting="same_kind")
        return wide

    def _to_bfloat16(self, values: F32) -> U16:
        bits = values.view(np.uint32)
        work, mask, narrow = self._scratch(bits.size)
        # Add half of what is cut off, less one where the last bit kept is even: ties then fall to even.
        np.right_shift(bits, np.uint32(16), out=work)
        np.bitwise_and(work, np.uint32(1), out=work)
        np.add(work, np.uint32(0x7FFF), out=work)
        np.add(work, bits, out=work)
        np.right_shift(work, np.uint32(16), out=work)
        np.copyto(narrow, work, casting="unsafe")
        np.isnan(values, out=mask)
        if mask.any():
            narrow[mask] = _QUIET_NAN
        return narrow

    def _to_float16(self, values: F32) -> U16:
        narrow = self._scratch(values.size)[2]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            np.copyto(narrow.view(np.float16), values, casting="same_kind")
        overflowed = np.isinf(narrow.view(np.float16)) & np.isfinite(values)
        if overflowed.any():
            raise ExportError(
                f"{values[overflowed][0]:g} is beyond the range of float16 (65504).",
                where=self.where,
                fix="Use bfloat16 or float32.",
            )
        return narrow

    def _wide_scratch(self, size: int) -> F32:
        if self._wide.size < size:
            self._wide = np.empty(size, np.float32)
        return self._wide[:size]

    def _scratch(self, size: int) -> tuple[U32, NDArray[np.bool_], U16]:
        if self._bits.size < size:
            self._bits, self._mask = np.empty(size, np.uint32), np.empty(size, np.bool_)
            self._narrow = np.empty(size, np.uint16)
        return self._bits[:size], self._mask[:size], self._narrow[:size]


def as_float64(block: Block, dtype: str) -> NDArray[np.float64]:
    """The elements of ``block`` (dtype ``dtype``, one of ``FLOATS``) as a flat float64 array of its own."""
    if dtype == "bfloat16":
        bits = np.frombuffer(block, np.uint16).astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32).astype(np.float64)
    return np.frombuffer(block, _NUMPY[dtype]).astype(np.float64)


def from_float64(values: NDArray[np.float64], dtype: str, *, where: str) -> Block:
    """The elements of ``values`` in ``dtype``, one of ``FLOATS``."""
    flat = np.ascontiguousarray(values).reshape(-1).data
    return flat if dtype == "float64" else Caster("float64", dtype, where=where)(flat)
