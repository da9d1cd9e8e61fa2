"""Unpickling by allow-list: what torch writes is read, anything else is refused without running it."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_swift.checkpoint.dtypes import ITEM_SIZES
from lightning_swift.checkpoint.unpickle import (
    METADATA_GLOBALS,
    kind,
    load_metadata,
    load_tensor_pickle,
    load_torch_metadata,
)
from lightning_swift.errors import CheckpointCorruptError, UnsafeCheckpointError
from tests.harness.checkpoints import save_dcp, small_state


class Bomb:
    """Unpickles to a call of ``function``."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> object:
        return self.call


def pickle_of(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    with zipfile.ZipFile(stream) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
def test_every_dtype_of_a_tensor_pickle_is_known(dtype: str) -> None:
    tensor = torch.zeros(3, 2, dtype=torch.uint8).to(getattr(torch, dtype))
    assert ITEM_SIZES[dtype] == tensor.element_size()
    found = load_tensor_pickle(pickle_of(tensor), where="x")
    assert (found.dtype, found.shape, found.stride, found.offset) == (dtype, (3, 2), (2, 1), 0)


def test_views_and_parameters_keep_their_layout() -> None:
    base = torch.arange(12.0).reshape(4, 3)
    found = load_tensor_pickle(pickle_of(torch.nn.Parameter(base[1:].t())), where="x")
    assert (found.shape, found.stride, found.offset) == ((3, 3), (1, 3), 3)


def test_metadata_of_torch_is_read_without_and_with_torch(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", small_state())
    path = tmp_path / "ck" / ".metadata"
    stand_in = load_metadata(path.read_bytes(), where=str(path))
    real = load_torch_metadata(path)
    assert isinstance(real, Metadata)
    assert real == pickle.loads(path.read_bytes())
    assert list(stand_in.get("state_dict_metadata")) == list(real.state_dict_metadata)
    assert {kind(entry) for entry in stand_in.get("state_dict_metadata").values()} == {
        "TensorStorageMetadata",
        "BytesStorageMetadata",
    }


CALLS = [
    (os.system, "touch"),
    (eval, "open"),
    (exec, "open"),
    (__import__, "os"),
    (getattr, "x"),
    (torch.load, "x"),
    (torch.jit.load, "x"),
]


@pytest.mark.parametrize(("function", "argument"), CALLS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_calls_is_refused_by_every_reader(
    function: object, argument: object, protocol: int, tmp_path: Path
) -> None:
    data = pickle.dumps({"a": Bomb(function, argument)}, protocol=protocol)
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    for read in (
        lambda: load_metadata(data, where="here"),
        lambda: load_tensor_pickle(data, where="here"),
        lambda: load_torch_metadata(path),
    ):
        with pytest.raises(UnsafeCheckpointError) as error:
            read()
        assert function.__name__ in str(error.value)  # type: ignore[attr-defined]


def test_no_code_runs_before_the_refusal(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    data = pickle.dumps([Bomb(open, str(marker), "w"), Bomb(os.mkdir, str(marker))])
    with pytest.raises(UnsafeCheckpointError, match=r"asks for (io|_io)\.open"):
        load_metadata(data, where="here")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.distributed.checkpoint.metadata", "field"),
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("builtins", "getattr"),
        ("collections", "namedtuple"),
    ],
)
def test_names_beside_the_list_are_refused_exactly(module: str, name: str, tmp_path: Path) -> None:
    # STACK_GLOBAL, as protocol 4 writes it, takes dotted names too.
    text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
    data = b"\x80\x04" + text + b"\x93."
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    with pytest.raises(UnsafeCheckpointError, match="nothing was run"):
        load_metadata(data, where="here")
    with pytest.raises(UnsafeCheckpointError, match="nothing was run"):
        load_torch_metadata(path)


def test_the_list_holds_no_function_that_could_do_harm() -> None:
    import importlib

    for module, name in METADATA_GLOBALS - {("pathlib._local", "PosixPath")}:
        value = getattr(importlib.import_module(module), name)
        assert isinstance(value, type | torch.dtype) or (module, name) == ("torch.serialization", "_get_layout")


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", b"\x80\x04N.", pickle.dumps({"a": 1}), b"\x80\x04\x95\xff"])
def test_bytes_that_are_no_metadata_are_corrupt(data: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match="here"):
        load_metadata(data, where="here")
    with pytest.raises(CheckpointCorruptError, match="here"):
        load_tensor_pickle(data, where="here")
