"""P3: a damaged or foreign file is named and refused before a weight is used; P6: no code of a checkpoint runs."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_swift.checkpoint.distcp import locate, read_index
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.checkpoint.newest import find_newest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.errors import CheckpointError
from tests.harness.checkpoints import edit_manifest, record, save_checkpoint, small_checkpoint

FILES = ["manifest.json", ".metadata", "__0_0.distcp", "meta.pt", "huggingface/config.json"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("corruption") / "a.ckpt")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def flips(data: bytes, count: int, seed: str) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    return [(generator.randrange(len(data)), generator.randrange(8)) for _ in range(count)]


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_file_named(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    data = path.read_bytes()
    for offset, bit in flips(data, 200, name):
        changed = bytearray(data)
        changed[offset] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(CheckpointError) as error:
            verify(checkpoint)
        assert Path(name).name in str(error.value), (offset, bit)
    path.write_bytes(data)
    verify(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_found_without_hashing_and_the_file_named(checkpoint: Path, name: str) -> None:
    path = checkpoint / name
    data = path.read_bytes()
    for length in {0, 1, len(data) // 3, len(data) // 2, len(data) - 2, len(data) - 1}:
        if name == "manifest.json" and length == len(data) - 1:
            continue  # only the line feed at the end is gone
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as error:
            verify(checkpoint, hashes=False)
        assert Path(name).name in str(error.value), length
        assert find_newest([checkpoint.parent]) is None


def test_a_merge_without_full_hashes_still_finds_every_bit_that_would_reach_it(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    data = path.read_bytes()
    whole = checkpoint.parent / "whole"
    merge_checkpoint(checkpoint, whole)
    expected = (whole / "model.safetensors").read_bytes()
    refused = accepted = 0
    for number, (offset, bit) in enumerate(flips(data, 300, "merge")):
        changed = bytearray(data)
        changed[offset] ^= 1 << bit
        path.write_bytes(changed)
        output = checkpoint.parent / f"out-{number}"
        try:
            merge_checkpoint(checkpoint, output)
        except CheckpointError as error:
            refused += "__0_0.distcp" in str(error) and not output.exists()
        else:
            # The flip lay in optimizer state or in padding.
            assert (output / "model.safetensors").read_bytes() == expected
            accepted += 1
    # Of this file about a third belongs to archives of model tensors, and padding is most of each.
    assert refused > 20
    assert refused + accepted == 300


def test_a_flipped_bit_in_a_tensor_is_refused_by_a_merge(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.ckpt", {"model.w": torch.zeros(100, 100), "model.t": torch.zeros(10, 90).t()})
    path = tmp_path / "a.ckpt" / "__0_0.distcp"
    data = path.read_bytes()
    with path.open("rb") as file:
        places = {
            name: locate(file.fileno(), t.chunks[0].entry, dtype=t.dtype, shape=t.shape)
            for name, t in read_index(tmp_path / "a.ckpt").tensors.items()
        }
    assert places["model.t"].stride is not None
    for name, place in places.items():
        offset = place.position + (20_000 if name == "model.w" else 1_800)
        changed = bytearray(data)
        changed[offset] ^= 1
        path.write_bytes(changed)
        for hashes, message in ((False, "CRC-32"), (True, "CRC-32|SHA-256")):
            with pytest.raises(CheckpointError, match=message):
                merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "out", verify_hashes=hashes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.ckpt"]


def test_a_full_check_finds_a_bit_in_what_a_merge_does_not_read(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    entry = read_index(checkpoint).tensors["optimizer_0.state.weight.exp_avg"].chunks[0].entry
    data[entry.offset + entry.length // 2] ^= 1
    path.write_bytes(data)
    merge_checkpoint(checkpoint, checkpoint.parent / "quick")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*SHA-256"):
        merge_checkpoint(checkpoint, checkpoint.parent / "full", verify_hashes=True)
    assert not (checkpoint.parent / "full").exists()


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def malicious_metadata(checkpoint: Path, payload: Marker) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(payload))


def malicious_meta(checkpoint: Path, payload: Marker) -> None:
    torch.save({"epoch": payload}, checkpoint / "meta.pt")


def malicious_entry(checkpoint: Path, payload: Marker) -> None:
    # As long as the archive it replaces, so that nothing else has to change.
    import io

    entry = read_index(checkpoint).tensors["model.weight"].chunks[0].entry
    stream = io.BytesIO()
    torch.save(payload, stream)
    data = bytearray((checkpoint / entry.file).read_bytes())
    archive = stream.getvalue()
    data[entry.offset : entry.offset + entry.length] = bytes(entry.length)
    data[entry.offset + entry.length - len(archive) : entry.offset + entry.length] = archive
    (checkpoint / entry.file).write_bytes(data)


@pytest.mark.parametrize("plant", [malicious_metadata, malicious_meta, malicious_entry])
@pytest.mark.parametrize("fitting", [False, True], ids=["damaged", "fitting-manifest"])
def test_no_code_of_a_checkpoint_runs(plant: Callable[[Path, Marker], None], fitting: bool, checkpoint: Path) -> None:
    marker = checkpoint.parent / "marker"
    plant(checkpoint, Marker(marker))
    if fitting:
        edit_manifest(checkpoint, files={name: record(checkpoint / name) for name in read_manifest(checkpoint).files})
    refused = 0
    for read in (
        lambda: verify(checkpoint),
        lambda: merge_checkpoint(checkpoint, checkpoint.parent / "out"),
    ):
        try:
            read()
        except CheckpointError:
            refused += 1
    # meta.pt is not read by either; with a fitting manifest nothing is wrong with it here.
    assert refused == {malicious_meta: 0, malicious_entry: 1, malicious_metadata: 2}[plant] or not fitting
    assert not marker.exists()
