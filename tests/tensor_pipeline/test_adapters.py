"""LoRA under stages and cut layers: adapters that the strategy puts in, and those of the user's own making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.callbacks import ExportForInference
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.exports import reload_here
from tests.harness.models import quiet_trainer, save_tiny_model
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import SHORT, FullModule, Numbers, train
from tests.tensor_pipeline.test_fit import BOTH, FIVE_DECIMALS, LAYERS, PP2, TP2

LORA = LoraSettings(r=4, alpha=8.0)


class UserLora(FullModule):
    """peft adapters that configure_model puts in."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        import torch
        from peft import LoraConfig, get_peft_model

        super().configure_model()
        torch.manual_seed(7)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)


def assert_close(found: Numbers, expected: Numbers, options: Any) -> None:
    errors = [abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)]
    assert max(errors) <= FIVE_DECIMALS, (options, found, expected)


def test_adapters_of_the_strategy(tmp_path: Path) -> None:
    expected = reference()
    on_four_ranks(expected, tmp_path / "lora.ckpt")
    manifest = read_manifest(tmp_path / "lora.ckpt")
    assert manifest.adapters is not None
    assert all(".stages." not in name for name in manifest.tensors)
    assert {name for name in manifest.tensors if "lora_" in name} == set(saved_by_one_rank(tmp_path / "one.ckpt"))
    # On a stage peft lists the layers of that stage; the checkpoint's list, by which an adapter is read, has all.
    targets = manifest.adapters["default"]["target_modules"]
    assert len(targets) == len([name for name in manifest.tensors if name.endswith("lora_A.default.weight")])


@ranks(1)
def reference() -> Numbers:
    return train(FullModule("llama", layers=LAYERS), FSDPBF16Strategy("32-true", lora=LORA), **SHORT)


@ranks(1)
def saved_by_one_rank(path: Path) -> list[str]:
    module = FullModule("llama", layers=LAYERS)
    train(module, FSDPBF16Strategy("32-true", lora=LORA), max_steps=1)
    module.trainer.save_checkpoint(path)
    return [name for name in read_manifest(path).tensors if "lora_" in name]


@ranks(4)
def on_four_ranks(expected: Numbers, path: Path) -> None:
    # Layers with adapters are checked where more is cut.
    cut = {**BOTH, "self_check": False}
    for options in ({**PP2, "schedule": "ZBVZeroBubble"}, cut, {**BOTH, "sequence_parallel": True}):
        module = FullModule("llama", layers=LAYERS)
        assert_close(train(module, TensorPipelineStrategy("32-true", lora=LORA, **options), **SHORT), expected, options)
    module.trainer.save_checkpoint(path)


# The linear layers of attention: experts are fused and stay as they are.
ATTENTION = LoraSettings(r=4, alpha=8.0, target_modules=["q_proj", "v_proj"])


def test_frozen_experts_are_left_to_their_folder(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "base", "qwen3_moe", layers=2, max_shard_size="100KB")
    losses = experts_on_two_ranks(folder, tmp_path)
    manifests = {name: read_manifest(tmp_path / f"{name}.ckpt") for name in ("auto", "whole")}
    assert manifests["whole"].base is None
    assert manifests["auto"].base is not None
    assert sum("experts" in name for name in manifests["auto"].base.tensors) == 4
    assert all("lora_" in name for name in manifests["auto"].tensors if name.startswith("model."))
    for name in manifests:
        merge_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name)
    written = [sorted((tmp_path / name).glob("*.safetensors")) for name in manifests]
    merged = [{key: value for file in files for key, value in load_file(file).items()} for files in written]
    assert merged[0].keys() == merged[1].keys() == stored_in(folder)
    assert all(torch.equal(value, merged[1][key]) for key, value in merged[0].items())
    assert resumed_on_one_rank(folder, tmp_path / "auto.ckpt") == pytest.approx(losses, abs=FIVE_DECIMALS)


def stored_in(folder: Path) -> set[str]:
    return {key for file in folder.glob("*.safetensors") for key in load_file(file)}


def folder_module(folder: Path) -> FullModule:
    return FullModule("qwen3_moe", folder=str(folder))


@ranks(2)
def experts_on_two_ranks(folder: Path, path: Path) -> float:
    for name, save_frozen in (("whole", True), ("auto", "auto")):
        options: dict[str, Any] = {**TP2, "self_check": False, "lora": ATTENTION, "save_frozen": save_frozen}
        module = folder_module(folder)
        train(module, TensorPipelineStrategy("32-true", **options), max_steps=1)
        module.trainer.save_checkpoint(path / f"{name}.ckpt")
    export = ExportForInference(str(path / "exported"), dtype=None)
    with reload_here():
        train(folder_module(folder), TensorPipelineStrategy("32-true", **options), max_steps=1, callbacks=[export])
    assert export.report is not None
    assert export.report.verified
    (results,) = module.trainer.validate(module, verbose=False)
    return results["val_loss"]


@ranks(1)
def resumed_on_one_rank(folder: Path, path: Path) -> float:
    trainer = quiet_trainer(strategy=FSDPBF16Strategy("32-true", lora=ATTENTION))
    (results,) = trainer.validate(folder_module(folder), ckpt_path=str(path), verbose=False)
    return results["val_loss"]


@pytest.mark.filterwarnings("ignore:Module ... LoraModel")
def test_adapters_of_the_user() -> None:
    user_on_four_ranks(train(UserLora("qwen3", layers=LAYERS), devices=1, **SHORT))


@ranks(4)
def user_on_four_ranks(expected: Numbers) -> None:
    for options in ({**PP2, "schedule": "Interleaved1F1B"}, BOTH):
        found = train(UserLora("qwen3", layers=LAYERS), TensorPipelineStrategy("32-true", **options), **SHORT)
        assert_close(found, expected, options)
