"""The torch-free index against torch itself: FSDP2 shards, column shards, odd layouts; and what it must refuse."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from lightning_swift.checkpoint.boxes import Box, check_cover
from lightning_swift.checkpoint.distcp import read_index
from lightning_swift.checkpoint.stream import read_tensor, stream_tensor
from lightning_swift.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError
from tests.harness.checkpoints import save_dcp, small_state
from tests.harness.ranks import ranks


def assert_bytes_equal(directory: Path, expected: dict[str, torch.Tensor]) -> None:
    index = read_index(directory)
    assert set(index.tensors) == set(expected)
    for name, tensor in expected.items():
        entry = index.tensors[name]
        assert entry.shape == tuple(tensor.shape)
        assert f"torch.{entry.dtype}" == str(tensor.dtype)
        assert read_tensor(directory, entry) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), (
            name
        )


def test_every_dtype_layout_and_object_of_one_process(tmp_path: Path) -> None:
    from lightning_swift.checkpoint.dtypes import ITEM_SIZES

    base = torch.arange(24.0)
    tensors = {
        **{f"d.{name}": torch.arange(6).to(torch.uint8).to(getattr(torch, name)) for name in ITEM_SIZES},
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "view": base.reshape(6, 4)[2:4],
        "transposed": base.reshape(6, 4).t(),
        "channels_last": torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last),
        "one": torch.ones(1, 1, 1),
        "parameter": torch.nn.Parameter(base.reshape(2, 12)),
    }
    save_dcp(tmp_path / "ck", {**tensors, "lr": 0.1, "betas": (0.9, 0.95)})
    assert_bytes_equal(tmp_path / "ck", {name: tensor.detach() for name, tensor in tensors.items()})
    assert list(read_index(tmp_path / "ck").objects) == ["lr", "betas"]


@ranks(2)
def test_fsdp_shards_with_uneven_rows(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    # 5, 3 and 1 rows over two ranks: uneven, and an empty shard.
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(3, 1))
    full = {f"model.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    save_dcp(tmp_path / "ck", {f"model.{name}": tensor for name, tensor in get_model_state_dict(model).items()})
    if dist.get_rank() == 0:
        assert_bytes_equal(tmp_path / "ck", full)
        assert len(read_index(tmp_path / "ck").tensors["model.0.weight"].chunks) == 2


@ranks(4)
def test_columns_grids_and_deep_axes(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import lightning_swift.checkpoint.stream as stream

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    full = {
        "columns": torch.randn(6, 10, generator=generator),
        "grid": torch.randn(7, 5, generator=generator),
        "strided": torch.randn(8, 3, generator=generator),
        "experts": torch.randn(3, 5, 4, generator=generator),
        "last": torch.randn(2, 3, 4, 5, generator=generator).bfloat16(),
        "replicated": torch.randn(3, 3, generator=generator),
    }
    places = {
        "columns": [Replicate(), Shard(1)],
        "grid": [Shard(0), Shard(1)],
        "strided": [Shard(0), Shard(0)],
        "experts": [Shard(1), Shard(2)],
        "last": [Shard(3), Shard(1)],
        "replicated": [Replicate(), Replicate()],
    }
    save_dcp(tmp_path / "ck", {name: distribute_tensor(full[name], mesh, places[name]) for name in full})
    if dist.get_rank() == 0:
        # Strips from a single element to the whole tensor.
        for strip in (1, 8, 40, 100, 1 << 22):
            stream._STRIP = strip
            assert_bytes_equal(tmp_path / "ck", full)


def test_a_strip_is_as_small_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_swift.checkpoint.stream as stream

    monkeypatch.setattr(stream, "_STRIP", 64)
    tensor = torch.arange(1000.0).reshape(10, 100).t().contiguous().t()
    save_dcp(tmp_path / "ck", {"t": tensor})
    blocks = [len(block) for block in stream_tensor(tmp_path / "ck", read_index(tmp_path / "ck").tensors["t"])]
    assert max(blocks) <= 64
    assert sum(blocks) == 4000


def doctored(directory: Path, change: Callable[[Metadata], Any]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = copy.deepcopy(metadata)
    change(changed)
    path.write_bytes(pickle.dumps(changed))


def storage(metadata: Metadata, name: str = "model.weight") -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def chunk(metadata: Metadata, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda m: setattr(storage(m)[1], "relative_path", "../x.distcp"), UnsafeCheckpointError, "leads outside"),
        (lambda m: setattr(storage(m)[1], "relative_path", "/etc/passwd"), UnsafeCheckpointError, "leads outside"),
        (lambda m: setattr(storage(m)[1], "relative_path", "__9_9.distcp"), CheckpointCorruptError, "not there"),
        (lambda m: setattr(storage(m)[1], "relative_path", 7), CheckpointCorruptError, "not a file"),
        (lambda m: setattr(storage(m)[1], "offset", -1), CheckpointCorruptError, "not a file"),
        (lambda m: setattr(storage(m)[1], "offset", 1 << 40), CheckpointCorruptError, "beyond the end"),
        (lambda m: setattr(storage(m)[1], "length", 1 << 40), CheckpointCorruptError, "beyond the end"),
        (lambda m: setattr(storage(m)[1], "transform_descriptors", ["zstd"]), CheckpointCorruptError, "transform"),
        (lambda m: m.storage_data.pop(storage(m)[0]), CheckpointCorruptError, "stored nowhere"),
        (lambda m: m.storage_data.update({"a": "b"}), CheckpointCorruptError, "unknown kind"),
        (lambda m: chunk(m, (0, 0), (5, 4)), CheckpointCorruptError, "holes"),
        (lambda m: chunk(m, (1, 0), (6, 4)), CheckpointCorruptError, "sticks out"),
        (lambda m: chunk(m, (0,), (6,)), CheckpointCorruptError, "sticks out"),
        (lambda m: chunk(m, (-1, 0), (6, 4)), CheckpointCorruptError, "natural"),
        (lambda m: m.state_dict_metadata.update({"x": 3}), CheckpointCorruptError, "neither"),
        (lambda m: m.state_dict_metadata.update({3: 3}), CheckpointCorruptError, "not text"),
        (lambda m: setattr(m, "storage_data", None), CheckpointCorruptError, "no state_dict_metadata"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(
    change: Callable[[Metadata], Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    save_dcp(tmp_path / "ck", small_state())
    doctored(tmp_path / "ck", change)
    with pytest.raises(kind, match=message):
        read_index(tmp_path / "ck")


def test_no_metadata_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_index(tmp_path)


def entry_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, 6), r"holds float32 \[4, 6\]"),
        (torch.zeros(6, 4).half(), r"holds float16 \[6, 4\]"),
        ([torch.zeros(6, 4)], "holds a list"),
        (3.0, "holds a float"),
    ],
)
def test_an_entry_that_is_not_what_metadata_says_is_refused(value: object, message: str, tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model.weight": torch.zeros(6, 4)})
    data = entry_bytes(value)
    (tmp_path / "ck" / "__0_0.distcp").write_bytes(data)
    doctored(tmp_path / "ck", lambda m: setattr(storage(m)[1], "length", len(data)))
    with pytest.raises(CheckpointCorruptError, match=message):
        read_tensor(tmp_path / "ck", read_index(tmp_path / "ck").tensors["model.weight"])


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_code_in_an_entry_does_not_run(tmp_path: Path) -> None:
    save_dcp(tmp_path / "ck", {"model.weight": torch.zeros(6, 4)})
    data = entry_bytes(Marker(tmp_path / "marker"))
    (tmp_path / "ck" / "__0_0.distcp").write_bytes(data)
    doctored(tmp_path / "ck", lambda m: setattr(storage(m)[1], "length", len(data)))
    with pytest.raises(UnsafeCheckpointError, match="__0_0"):
        read_tensor(tmp_path / "ck", read_index(tmp_path / "ck").tensors["model.weight"])
    assert not (tmp_path / "marker").exists()


def test_covers_are_exact() -> None:
    def cover(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        check_cover(shape, sorted((Box(*box) for box in boxes), key=lambda box: box.offsets), where="t")

    cover((), ((), ()))
    cover((0, 3))
    cover((4, 4), ((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3)))
    # Same volume as the tensor, so only the test for overlaps can tell.
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        cover((4, 4), ((0, 0), (2, 4)), ((1, 0), (2, 4)))
    with pytest.raises(CheckpointCorruptError, match="overlap"):
        cover((4,), ((0,), (2,)), ((0,), (2,)))
    with pytest.raises(CheckpointCorruptError, match="holes"):
        cover((4, 4), ((0, 0), (2, 4)))
    with pytest.raises(CheckpointCorruptError, match="holes"):
        cover(())
