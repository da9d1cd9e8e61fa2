"""Checkpoints that leave their frozen weights to the pretrained folder: found, moved, changed or gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.checkpoint.export import export_checkpoint
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.cli import main
from lightning_swift.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigurationError
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.checkpoint.runs import fit, mean_losses
from tests.harness.exports import reload_here
from tests.harness.models import UserModule, save_tiny_model
from tests.harness.ranks import ranks

LORA = LoraSettings(r=4, alpha=8)
BASE = "model.base_model.model."


@pytest.fixture
def base(tmp_path: Path) -> Path:
    # Two files and an index, and one tensor under two names.
    return save_tiny_model(tmp_path / "base", "qwen3", max_shard_size="500KB")


class Changed(UserModule):
    """With a norm that is not the folder's any more, and is not trained either."""

    def configure_model(self) -> None:
        super().configure_model()
        with torch.no_grad():
            self.model.model.norm.weight.mul_(1.5)


def train(folder: Path, *, kind: type[UserModule] = UserModule, sharded: bool = False, **more: Any) -> list[float]:
    from lightning.pytorch import seed_everything

    options = more.pop("options", {})
    seed_everything(3, verbose=False)
    module = kind(folder=str(folder))
    strategy = FSDPBF16Strategy if sharded else DDPBF16Strategy
    fit(module, strategy=lambda: strategy("32-true", lora=LORA, **options), **more)
    return mean_losses(module)


@ranks(1, deadline=120)
def save_alone(folder: str, path: str, options: dict[str, Any]) -> None:
    train(Path(folder), steps=2, save=Path(path), options=options)


@pytest.fixture
def checkpoint(tmp_path: Path, base: Path) -> Path:
    save_alone(str(base), str(tmp_path / "a.ckpt"), {})
    return tmp_path / "a.ckpt"


def names_of_model(path: Path) -> set[str]:
    return {name for name in read_manifest(path).tensors if name.startswith("model.")}


def test_merge_and_export_read_the_folder_wherever_it_lies(
    tmp_path: Path, base: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert all("lora_" in name for name in names_of_model(checkpoint))
    record = read_manifest(checkpoint).base
    assert record is not None
    assert len([name for name in record.files if name.endswith(".safetensors")]) > 1
    save_alone(str(base), str(tmp_path / "full.ckpt"), {"save_frozen": True})
    assert names_of_model(tmp_path / "full.ckpt") > names_of_model(checkpoint)
    merge_checkpoint(tmp_path / "full.ckpt", tmp_path / "full")
    merge_checkpoint(checkpoint, tmp_path / "there")
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointNotFoundError, match=r"base: the pretrained folder is not there.*--base"):
        merge_checkpoint(checkpoint, tmp_path / "gone")
    with pytest.raises(CheckpointNotFoundError, match="pretrained folder is not there"):
        export_checkpoint(checkpoint, tmp_path / "gone")
    assert main(["merge", str(checkpoint), str(tmp_path / "cli"), "--base", str(tmp_path / "moved")]) == 0
    assert (
        main(["merge", str(checkpoint), str(tmp_path / "cli"), "--base", str(tmp_path / "moved"), "--overwrite"]) == 0
    )
    capsys.readouterr()
    with reload_here():
        report = export_checkpoint(checkpoint, tmp_path / "moved-out", base=tmp_path / "moved")
        assert report.verified
        assert export_checkpoint(checkpoint, tmp_path / "adapter", format="adapter", base=tmp_path / "moved").verified
    expected = load_file(tmp_path / "full" / "model.safetensors")
    for name in ("there", "cli", "moved-out"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_changed_folder_is_refused_with_the_file_that_changed(tmp_path: Path, base: Path, checkpoint: Path) -> None:
    file = next(base.glob("*.safetensors"))
    tensors = load_file(file)
    first = next(iter(tensors))
    tensors[first] = tensors[first] + 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatchError, match=rf"base: {file.name}: changed or missing"):
        merge_checkpoint(checkpoint, tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointMismatchError, match=file.name):
        merge_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@ranks(2, deadline=120)
def _resume(base: str, folder: str) -> None:
    root = Path(folder)
    for sharded in (True, False):
        path = root / f"{sharded}.ckpt"
        whole = train(Path(base), sharded=sharded, steps=5)
        train(Path(base), sharded=sharded, steps=3, save=path)
        assert all("lora_" in name for name in names_of_model(path))
        # From another folder of the same content, and with weights that the checkpoint's folder corrects.
        for kind, source in ((UserModule, root / "copy"), (Changed, Path(base))):
            assert train(source, kind=kind, sharded=sharded, steps=5, ckpt_path=path) == whole[3:]
    with pytest.raises(CheckpointMismatchError, match="quantised as nf4 twice"):
        train(Path(base), steps=5, ckpt_path=root / "False.ckpt", options={"quantization": "nf4"})


def test_a_resume_takes_the_frozen_weights_from_the_folder(tmp_path: Path, base: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    _resume(str(base), str(tmp_path))


@ranks(2, deadline=120)
def _what_is_saved(base: str, folder: str) -> None:
    for sharded in (True, False):
        path = Path(folder) / f"{sharded}.ckpt"
        train(Path(base), kind=Changed, sharded=sharded, steps=1, save=path)
        frozen = {name for name in names_of_model(path) if "lora_" not in name}
        assert frozen == {f"model.{BASE}model.norm.weight"}


def test_a_frozen_weight_that_is_not_the_folders_is_saved(tmp_path: Path, base: Path) -> None:
    _what_is_saved(str(base), str(tmp_path))


def test_save_frozen_has_three_values() -> None:
    with pytest.raises(ConfigurationError, match="save_frozen='never'"):
        FSDPBF16Strategy(save_frozen="never")  # type: ignore[arg-type]
