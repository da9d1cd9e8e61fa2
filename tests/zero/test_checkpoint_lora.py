"""LoRA and QLoRA checkpoints: only what was trained is in them, and every strategy, merge and export take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_swift import lazy_pretrained
from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.callbacks.export import ExportForInference
from lightning_swift.callbacks.merge import MergeShardedCheckpoint
from lightning_swift.callbacks.sharded_checkpoint import ShardedCheckpoint
from lightning_swift.checkpoint.export import export_checkpoint
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.zero import ZeROStrategy
from tests.checkpoint.runs import fit, mean_losses
from tests.harness.models import UserModule
from tests.harness.ranks import ranks
from tests.zero.states import Look, state_digests

pytestmark = pytest.mark.usefixtures("ops")

LORA = LoraSettings(r=4, alpha=8)
SEED = 5


class Lazy(UserModule):
    def configure_model(self) -> None:
        if self.model is None:
            self.model = lazy_pretrained(str(self.folder))
            self.model.train()


def strategy(name: str, quantization: Any = None, **options: Any) -> Any:
    kind, _, offload = name.partition("-")
    if kind == "ddp":
        return DDPBF16Strategy("32-true", lora=LORA, quantization=quantization, **options)
    if kind == "fsdp":
        return FSDPBF16Strategy("32-true", lora=LORA, **options)
    where: dict[str, Any] = {"offload_optimizer": "cpu"} if offload else {}
    return ZeROStrategy(int(kind[-1]), "32-true", lora=LORA, quantization=quantization, **where, **options)  # type: ignore[arg-type]


def run(
    name: str, quantization: Any, folder: str, *, steps: int, kind: Callable[..., UserModule] = Lazy, **more: Any
) -> tuple[list[float], dict[str, str]]:
    """Losses of a run, and its state at the end."""
    options = more.pop("options", {})
    seed_everything(SEED, verbose=False)
    module = kind(folder=folder)
    trainer = fit(module, steps=steps, strategy=lambda: strategy(name, quantization, **options), **more)
    return mean_losses(module), state_digests(trainer)


def trained(state: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in state.items() if "lora_" in name}


@ranks(2, deadline=240)
def _save(base: str, saver: str, quantization: Any, path: str) -> tuple[list[float], dict[str, str]]:
    whole, _ = run(saver, quantization, base, steps=6)
    _, state = run(saver, quantization, base, steps=3, save=Path(path))
    rest, _ = run(saver, quantization, base, steps=6, ckpt_path=path)
    assert rest == whole[3:]
    return whole[3:], trained(state)


def _resume(
    base: str, readers: list[tuple[str, Callable[..., UserModule]]], quantization: Any, path: str, saved: Any
) -> None:
    losses, state = saved
    for name, kind in readers:
        look = Look()
        found, _ = run(name, quantization, base, steps=6, kind=kind, ckpt_path=path, callbacks=[look])
        assert trained(look.seen) == state, name
        # Other strategies and numbers of ranks sum in another order: FP32 rounding, a few units of 2**-24 relative to
        # a loss of 5.5 after three steps.
        assert found == pytest.approx(losses, abs=5e-6), name


resume_at_two = ranks(2, deadline=240)(_resume)
resume_alone = ranks(1, deadline=240)(_resume)


def check_left_out(path: Path, base: str, *, quantised: bool) -> None:
    manifest = read_manifest(path)
    assert manifest.base is not None
    assert manifest.base.folder == base
    assert not [name for name in manifest.tensors if name.startswith("model.") and "lora_" not in name]
    assert len(manifest.base.tensors) == 30
    assert set(manifest.base.files) == {"config.json", "model.safetensors"}
    assert (manifest.quantization is not None) == quantised


@pytest.mark.slow
def test_qlora_under_stage_3_goes_on_at_one_rank_and_under_ddp(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "a.ckpt"
    saved = _save(folder, "zero3", "nf4", str(path))
    check_left_out(path, folder, quantised=True)
    resume_at_two(folder, [("ddp", UserModule), ("zero1", Lazy)], "nf4", str(path), saved)
    resume_alone(folder, [("zero3", UserModule), ("zero2-offload", Lazy), ("ddp", Lazy)], "nf4", str(path), saved)


@pytest.mark.slow
def test_lora_goes_on_under_every_strategy(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "a.ckpt"
    saved = _save(folder, "zero3-offload", None, str(path))
    check_left_out(path, folder, quantised=False)
    resume_at_two(folder, [("fsdp", UserModule), ("zero2", Lazy)], None, str(path), saved)
    resume_alone(folder, [("ddp", UserModule), ("zero3", Lazy), ("fsdp", Lazy)], None, str(path), saved)


@ranks(2, deadline=240)
def _everything_saved(base: str, path: str) -> None:
    whole, _ = run("zero3", "nf4", base, steps=5)
    run("zero3", "nf4", base, steps=3, save=Path(path), options={"save_frozen": True})
    manifest = read_manifest(Path(path))
    assert manifest.base is None
    assert any(name.endswith(".base_layer.weight.absmax") for name in manifest.tensors)
    assert "model.model.base_model.model.lm_head.weight" in manifest.tensors
    for name in ("zero3", "ddp"):
        rest, _ = run(name, "nf4", base, steps=5, ckpt_path=path)
        assert rest == pytest.approx(whole[3:], abs=5e-6)


@pytest.mark.slow
def test_a_quantised_base_can_be_saved_packed_and_is_merged_unpacked(tmp_path: Path, folder: str) -> None:
    from safetensors.torch import load_file

    _everything_saved(folder, str(tmp_path / "packed.ckpt"))
    _save_once(folder, "zero3", "nf4", str(tmp_path / "left.ckpt"), 3)
    found = {}
    for name in ("packed", "left"):
        merge_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    plain = load_file(Path(folder) / "model.safetensors")
    for tensors in found.values():
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in plain.items()}
    # The base that lies in the checkpoint and the one made again from the folder are the same numbers.
    assert all(torch.equal(found["packed"][n], found["left"][n]) for n in plain)


@ranks(2, deadline=240)
def _save_once(base: str, saver: str, quantization: Any, path: str, steps: int) -> None:
    run(saver, quantization, base, steps=steps, save=Path(path))


@ranks(2, deadline=240)
def _callbacks(base: str, folder: str, name: str, quantization: Any) -> None:
    out = Path(folder)
    callbacks = [
        ShardedCheckpoint(dirpath=str(out / "checkpoints"), every_n_train_steps=2),
        MergeShardedCheckpoint(str(out / "merged"), dtype="float32"),
        ExportForInference(str(out / "model"), dtype="float32"),
        ExportForInference(str(out / "adapter"), format="adapter"),
    ]
    run(name, quantization, base, steps=2, callbacks=callbacks, enable_checkpointing=True)
    assert all(callback.report is not None for callback in callbacks[2:])  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantization"), [("zero3", "nf4"), ("zero2", None), ("ddp", "int8")])
def test_callbacks_merge_and_export(tmp_path: Path, folder: str, name: str, quantization: Any) -> None:
    from safetensors.torch import load_file

    _callbacks(folder, str(tmp_path), name, quantization)
    merged, exported = (load_file(tmp_path / part / "model.safetensors") for part in ("merged", "model"))
    plain = load_file(Path(folder) / "model.safetensors")
    assert merged.keys() == exported.keys() == plain.keys()
    for key, tensor in plain.items():
        assert merged[key].shape == tensor.shape
        assert torch.equal(merged[key], exported[key])
    checkpoint = next((tmp_path / "checkpoints").glob("*.ckpt"))
    report = export_checkpoint(checkpoint, tmp_path / "again", dtype="float32")
    assert report.verified
    assert export_checkpoint(checkpoint, tmp_path / "adapter-again", format="adapter").verified
    _same_adapter(tmp_path / "adapter", tmp_path / "adapter-again", folder)


def _same_adapter(one: Path, other: Path, base: str) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    first, second = (load_file(path / "adapter_model.safetensors") for path in (one, other))
    assert first.keys() == second.keys()
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(one))
    loaded = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora_" in name}
    assert loaded.keys() == first.keys()
    assert all(torch.equal(first[n], second[n]) and torch.equal(first[n], loaded[n]) for n in first)
