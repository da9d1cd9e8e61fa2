"""Unpickling by allow-list, so that reading a checkpoint never runs code; the list is here and nowhere else.

Two kinds of pickle lie in a checkpoint: ``.metadata`` (``torch.distributed.checkpoint.metadata.Metadata``) and the
``data.pkl`` inside every tensor entry of a ``.distcp`` file. Every global they may name is listed by exact module and
name. Without torch the listed names become inert stand-ins; :func:`load_torch_metadata` gives torch's own objects.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from lightning_swift.checkpoint.dtypes import ITEM_SIZES
from lightning_swift.errors import CheckpointCorruptError, SwiftError, UnsafeCheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = [
    "METADATA_GLOBALS",
    "TENSOR_GLOBALS",
    "DType",
    "StandIn",
    "StorageRef",
    "TensorRef",
    "kind",
    "load_metadata",
    "load_tensor_pickle",
    "load_torch_metadata",
]

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)

METADATA_GLOBALS = frozenset(
    {
        *((_METADATA_MODULE, name) for name in _METADATA_CLASSES),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("torch", name) for name in ITEM_SIZES),
        # The path that was saved to; Python 3.13 moved the class.
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),
        ("collections", "OrderedDict"),
    }
)
"""What ``.metadata`` may name: ``(module, name)``."""

TENSOR_GLOBALS = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"),
        ("torch.storage", "UntypedStorage"),
        ("collections", "OrderedDict"),
        *(("torch", name) for name in ITEM_SIZES),
        *(("torch", name) for name in _STORAGES),
    }
)
"""What the ``data.pkl`` of a tensor entry may name: ``(module, name)``."""

# What the unpicklers of CPython raise on bytes that are not a pickle, besides UnpicklingError.
_MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    ImportError,
)


class StandIn:
    """An object of one allow-listed class: its arguments and its state, and no behaviour."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Attribute ``name`` of the pickled object, None where the pickle has none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _MetadataStandIn(StandIn):
    """Common base of the stand-ins that :func:`kind` tells apart."""


_STAND_INS: dict[str, type[StandIn]] = {
    name: type(name, (_MetadataStandIn,), {})
    for name in (*_METADATA_CLASSES, "_StorageInfo", "_get_layout", "PosixPath")
}


@dataclass(frozen=True)
class DType:
    """A dtype by torch's name; ``None`` where an untyped storage leaves it to the tensor."""

    name: str | None


@dataclass(frozen=True)
class StorageRef:
    """The record ``data/KEY`` of a ``torch.save`` archive."""

    dtype: str | None
    key: str


@dataclass(frozen=True)
class TensorRef:
    """A tensor as a view of a storage: ``offset``, ``shape`` and ``stride`` in elements."""

    storage: StorageRef
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _size(items: Any = ()) -> tuple[Any, ...]:
    return tuple(items)


def _rebuild_tensor(storage: StorageRef, offset: int, size: Any, stride: Any, *rest: Any) -> TensorRef:
    # rest: requires_grad, backward hooks, dtype (v3), metadata
    typed = rest[2].name if len(rest) > 2 and isinstance(rest[2], DType) else storage.dtype
    if typed is None:
        raise pickle.UnpicklingError("a tensor without a dtype")
    return TensorRef(storage=storage, dtype=typed, offset=offset, shape=tuple(size), stride=tuple(stride))


def _rebuild_parameter(data: TensorRef, *_: Any) -> TensorRef:
    return data


_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch.storage", "UntypedStorage"): DType(None),
    **{("torch", name): DType(name) for name in ITEM_SIZES},
    **{("torch", storage): DType(name) for storage, name in _STORAGES.items()},
}


class _Restricted(pickle.Unpickler):
    """Unpickler for which every global outside ``allowed`` is an error and the others are inert."""

    def __init__(self, data: bytes, *, allowed: frozenset[tuple[str, str]], where: str) -> None:
        super().__init__(io.BytesIO(data))
        self.allowed = allowed
        self.where = where

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise UnsafeCheckpointError(
                f"the pickle asks for {module}.{name}, which a checkpoint has no reason to name; nothing was run.",
                where=self.where,
                fix="Do not use this checkpoint unless you know who wrote it and why.",
            )
        return self.resolve(module, name)

    def resolve(self, module: str, name: str) -> Any:
        plain = _PLAIN.get((module, name))
        return _STAND_INS[name] if plain is None else plain

    @override
    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a persistent id where none belongs")


class _RestrictedTensor(_Restricted):
    @override
    def persistent_load(self, pid: Any) -> StorageRef:
        match pid:
            case ("storage", DType(name=name), str(key), str(), int()):
                return StorageRef(dtype=name, key=key)
            case _:
                raise pickle.UnpicklingError("a persistent id that is not a storage")


class _RestrictedTorch(_Restricted):
    @override
    def resolve(self, module: str, name: str) -> Any:
        return getattr(import_module(module), name)


_T = TypeVar("_T")


def _load(unpickler: _Restricted, expected: type[_T]) -> _T:
    try:
        value = unpickler.load()
    except SwiftError:
        raise
    except _MALFORMED as error:
        raise CheckpointCorruptError(
            f"not a readable pickle ({type(error).__name__}: {error}).",
            where=unpickler.where,
            fix="Use another checkpoint of the run.",
        ) from error
    if not isinstance(value, expected):
        raise CheckpointCorruptError(
            f"the pickle holds a {type(value).__name__} instead of a {expected.__name__}.", where=unpickler.where
        )
    return value


def load_metadata(data: bytes, *, where: str) -> StandIn:
    """The content of a ``.metadata`` file as stand-ins; torch is not imported.

    Raises:
        UnsafeCheckpointError: The pickle names a global that is not allowed.
        CheckpointCorruptError: The bytes are no pickle of a ``Metadata``.
    """
    return _load(_Restricted(data, allowed=METADATA_GLOBALS, where=where), _STAND_INS["Metadata"])


def load_tensor_pickle(data: bytes, *, where: str) -> TensorRef:
    """The ``data.pkl`` of a saved tensor: which storage, dtype, shape and stride; torch is not imported.

    Raises:
        UnsafeCheckpointError: The pickle names a global that is not allowed.
        CheckpointCorruptError: The bytes are no pickle of a tensor.
    """
    return _load(_RestrictedTensor(data, allowed=TENSOR_GLOBALS, where=where), TensorRef)


def load_torch_metadata(path: Path) -> Metadata:
    """Torch's own ``Metadata`` from the ``.metadata`` file ``path``, by the same allow-list; imports torch.

    Names and ranges of files inside it are not checked here: :func:`~lightning_swift.checkpoint.safe_load.verify`
    has done so for a checkpoint that it accepted.

    Raises:
        UnsafeCheckpointError: The pickle names a global that is not allowed.
        CheckpointCorruptError: The bytes are no pickle of a ``Metadata``.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    return _load(_RestrictedTorch(path.read_bytes(), allowed=METADATA_GLOBALS, where=str(path)), Metadata)


def kind(value: Any) -> str | None:
    """Class name of a stand-in for a class of DCP's metadata, None for anything else."""
    return type(value).__name__ if isinstance(value, _MetadataStandIn) else None
