"""``verify``: a whole checkpoint passes; anything missing, extra, changed or leading outside is named."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_swift.checkpoint.layout import FileRecord, TensorRecord, read_manifest
from lightning_swift.checkpoint.safe_load import check_hashes, verify
from lightning_swift.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError
from tests.harness.checkpoints import edit_manifest, record, small_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("safe") / "a.ckpt")


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


FILES = [".metadata", "__0_0.distcp", "meta.pt", "huggingface/config.json"]


def test_a_whole_checkpoint_passes_without_torch(checkpoint: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from lightning_swift.checkpoint.safe_load import verify;"
        "from lightning_swift.checkpoint.newest import find_newest;"
        "from lightning_swift.checkpoint.inspect import describe;"
        "p = Path(sys.argv[1]); print(verify(p).global_step, find_newest([p.parent]) == p, describe(p)['whole'],"
        "sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["10", "True", "True", "[]"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointCorruptError, match=f"missing {name}"):
        verify(checkpoint, hashes=False)


@pytest.mark.parametrize("name", ["__1_0.distcp", "huggingface/extra.json", "other/x", ".hidden"])
def test_an_extra_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).touch()
    with pytest.raises(CheckpointCorruptError, match=name.partition("/")[0]):
        verify(checkpoint, hashes=False)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["cut", "grown"])
def test_another_size_is_named(checkpoint: Path, name: str, change: str) -> None:
    data = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(data[:-1] if change == "cut" else data + b"\0")
    with pytest.raises(CheckpointCorruptError, match=rf"{name} has {len(data) + (-1 if change == 'cut' else 1)} bytes"):
        verify(checkpoint, hashes=False)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_named(checkpoint: Path, name: str) -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / name).write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=f"{name}.*SHA-256"):
        verify(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_link_is_refused_even_if_it_leads_to_the_same_bytes(checkpoint: Path, name: str) -> None:
    os.rename(checkpoint / name, checkpoint.parent / "elsewhere")
    (checkpoint / name).symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(UnsafeCheckpointError, match=name):
        verify(checkpoint)


def test_a_linked_folder_is_refused(checkpoint: Path) -> None:
    os.rename(checkpoint / "huggingface", checkpoint.parent / "elsewhere")
    (checkpoint / "huggingface").symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(UnsafeCheckpointError, match="huggingface"):
        verify(checkpoint)


@pytest.mark.parametrize("name", ["__0_0.distcp", "extra"])
def test_a_fifo_is_refused_and_not_opened(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    with pytest.raises(UnsafeCheckpointError, match=name):
        verify(checkpoint)


def test_the_checkpoint_itself_may_be_a_link(checkpoint: Path) -> None:
    (checkpoint.parent / "last.ckpt").symlink_to(checkpoint.name)
    assert verify(checkpoint.parent / "last.ckpt").global_step == 10


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "huggingface/../../x", "a/b"])
def test_a_manifest_cannot_list_files_elsewhere(checkpoint: Path, name: str) -> None:
    edit_manifest(checkpoint, files={**read_manifest(checkpoint).files, name: FileRecord(1, "00")})
    with pytest.raises(UnsafeCheckpointError, match="leads outside"):
        verify(checkpoint)


def test_metadata_must_be_listed(checkpoint: Path) -> None:
    files = dict(read_manifest(checkpoint).files)
    del files[".metadata"]
    edit_manifest(checkpoint, files=files)
    with pytest.raises(CheckpointCorruptError, match=r"does not list \.metadata"):
        verify(checkpoint)


@pytest.mark.parametrize(
    "tensor",
    [("model.weight", (4, 6), "float32"), ("model.weight", (6, 4), "float64"), ("model.other", (1,), "float32"), None],
)
def test_tensors_of_manifest_and_metadata_must_agree(
    checkpoint: Path, tensor: tuple[str, tuple[int, ...], str] | None
) -> None:
    tensors = dict(read_manifest(checkpoint).tensors)
    if tensor is None:
        del tensors["model.weight"]
    else:
        tensors[tensor[0]] = TensorRecord(tensor[1], tensor[2])
    edit_manifest(checkpoint, tensors=tensors)
    with pytest.raises(CheckpointCorruptError, match=r"model\.\w+ is .* in the manifest and .* in \.metadata"):
        verify(checkpoint)


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return Path.touch, (self.path,)


def test_code_in_metadata_does_not_run_even_with_a_fitting_manifest(checkpoint: Path) -> None:
    marker = checkpoint.parent / "marker"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Marker(marker)))
    files = {**read_manifest(checkpoint).files, ".metadata": record(checkpoint / ".metadata")}
    edit_manifest(checkpoint, files=files)
    with pytest.raises(UnsafeCheckpointError, match=r"\.metadata"):
        verify(checkpoint)
    assert not marker.exists()


def test_a_folder_without_manifest_is_not_a_checkpoint(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError):
        verify(checkpoint)


def test_hashing_can_leave_out_the_shards(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    broken = {name: replace(r, sha256="0" * 64) for name, r in manifest.files.items() if name.endswith(".distcp")}
    manifest = replace(manifest, files={**manifest.files, **broken})
    check_hashes(checkpoint, manifest, tensors=False)
    with pytest.raises(CheckpointCorruptError, match="distcp"):
        check_hashes(checkpoint, manifest)
