"""Checkpoints made to run code or to lead elsewhere: refused by name when a strategy loads them, and nothing runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.checkpoint.layout import META, METADATA, FileRecord, read_manifest
from lightning_swift.checkpoint.sharded import load_into, load_meta
from lightning_swift.errors import CheckpointError, UnsafeCheckpointError
from tests.checkpoint.runs import fit
from tests.harness.checkpoints import edit_manifest, record, save_dcp, write_manifest
from tests.harness.models import UserModule
from tests.harness.ranks import ranks, run_ranks


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def saved(path: Path) -> None:
    fit(UserModule(layers=1), steps=1, save=path)


def resume(path: Path) -> str:
    try:
        fit(UserModule(layers=1), steps=2, ckpt_path=path)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def rehash(directory: Path, name: str) -> None:
    """Make the manifest agree with a changed file, as an attacker would."""
    files: dict[str, FileRecord] = dict(read_manifest(directory).files)
    edit_manifest(directory, files=files | {name: record(directory / name)})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "a.ckpt"
    run_ranks(saved, 2, (path,))
    return path


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(checkpoint, tmp_path / "a.ckpt"))


def test_a_pickle_in_metadata_never_runs(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (copy / METADATA).write_bytes(pickle.dumps(Bomb(marker)))
    rehash(copy, METADATA)
    text = run_ranks(resume, 2, (copy,))
    assert text.startswith("UnsafeCheckpointError")
    assert METADATA in text
    assert not marker.exists()


def test_a_pickle_in_meta_never_runs(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    torch.save({"epoch": 1, "bomb": Bomb(marker)}, copy / META)
    rehash(copy, META)
    text = run_ranks(resume, 2, (copy,))
    assert text.startswith("UnsafeCheckpointError")
    assert META in text
    with pytest.raises(UnsafeCheckpointError):
        load_meta(copy)
    assert not marker.exists()


def test_a_pickle_among_the_values_never_runs(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.ckpt"
    name = "optimizer_0.param_groups.w.lr"
    save_dcp(path, {name: Bomb(marker), "model.w": torch.ones(2)})
    torch.save({}, path / META)
    write_manifest(path)
    with pytest.raises(UnsafeCheckpointError, match=r"the value of optimizer_0\.param_groups\.w\.lr holds a type"):
        load_into(path, {name: None, "model.w": torch.zeros(2)}, strict=True)
    assert not marker.exists()


def test_a_pickle_in_place_of_a_tensor_never_runs(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.ckpt"
    save_dcp(path, {"model.w": torch.ones(64)})
    import io

    buffer = io.BytesIO()
    torch.save(Bomb(marker), buffer)
    shard = path / "__0_0.distcp"
    shard.write_bytes(buffer.getvalue().ljust(shard.stat().st_size, b"\0"))
    write_manifest(path)
    with pytest.raises(CheckpointError):
        load_into(path, {"model.w": torch.zeros(64)}, strict=True)
    assert not marker.exists()


def test_a_path_in_metadata_that_leads_outside_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "a.ckpt", tmp_path / "other"
    for directory, value in ((path, 1.0), (other, 2.0)):
        save_dcp(directory, {"model.w": torch.full((4,), value)})
    write_manifest(path)
    data = (path / METADATA).read_bytes()
    metadata = pickle.loads(data)
    for info in metadata.storage_data.values():
        info.relative_path = "../other/__0_0.distcp"
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    rehash(path, METADATA)
    target = torch.zeros(4)
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        load_into(path, {"model.w": target}, strict=True)
    assert target.eq(0).all()


@ranks(2)
def test_a_plain_file_with_code_never_runs(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    if os.environ["RANK"] == "0":
        torch.save({"state_dict": {}, "bomb": Bomb(marker)}, tmp_path / "a.ckpt")
    torch.distributed.barrier()
    assert resume(tmp_path / "a.ckpt").startswith("UnsafeCheckpointError")
    assert not marker.exists()


@ranks(2)
def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    if os.environ["RANK"] == "0":
        (tmp_path / "text.ckpt").write_text("not a checkpoint")
        (tmp_path / "empty.ckpt").mkdir()
        torch.save({"weights": 1}, tmp_path / "other.ckpt")
    torch.distributed.barrier()
    assert resume(tmp_path / "text.ckpt").startswith(("UnsafeCheckpointError", "CheckpointCorruptError"))
    assert resume(tmp_path / "empty.ckpt").startswith("CheckpointNotFoundError")
    assert resume(tmp_path / "other.ckpt").startswith("CheckpointCorruptError")
    assert resume(tmp_path / "never.ckpt").startswith("CheckpointNotFoundError")


def test_an_extra_and_a_missing_file_are_named(copy: Path) -> None:
    (copy / "extra.bin").write_text("x")
    assert "extra.bin" in run_ranks(resume, 2, (copy,))
    (copy / "extra.bin").unlink()
    (copy / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in run_ranks(resume, 2, (copy,))
