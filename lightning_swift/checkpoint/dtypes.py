"""Dtypes by torch's name, known without torch: bytes per element and safetensors' name."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["FLOATS", "ITEM_SIZES", "SAFETENSORS_NAMES", "Block"]

Block: TypeAlias = bytes | memoryview
"""Some consecutive bytes of a tensor."""

ITEM_SIZES = {
    "complex128": 16,
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
}
"""Bytes per element of every dtype that a checkpoint may hold."""

SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""Names in the header of a safetensors file; a dtype that is not here cannot be written to one."""

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
"""The dtypes a cast applies to; every other one is copied as it is."""
