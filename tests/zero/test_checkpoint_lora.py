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
from tests.checkpoint.runs import SaveAt, fit, mean_losses
from tests.harness.exports import reload_here
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


# Saver and quantisation; what goes on from its checkpoint at two ranks, and at one.
Reader = tuple[str, Callable[..., UserModule]]
ROUTES: list[tuple[str, Any, list[Reader], list[Reader]]] = [
    ("zero3", "nf4", [("ddp", UserModule)], [("zero3", UserModule), ("zero2-offload", Lazy)]),
    ("zero3-offload", None, [("fsdp", UserModule), ("zero2", Lazy)], [("ddp", UserModule), ("zero3", Lazy)]),
]


@ranks(2, deadline=300)
def _save(base: str, folder: str) -> list[tuple[list[float], dict[str, str]]]:
    found = []
    for saver, quantization, readers, _ in ROUTES:
        path = Path(folder) / f"{saver}.ckpt"
        look = Look()
        whole, _ = run(saver, quantization, base, steps=6, callbacks=[SaveAt(path, 3)])
        rest, _ = run(saver, quantization, base, steps=6, ckpt_path=path, callbacks=[look])
        assert rest == whole[3:]
        found.append((whole[3:], trained(look.seen)))
        check_readers(base, path, quantization, readers, found[-1])
    packed = Path(folder) / "packed.ckpt"
    run("zero3", "nf4", base, steps=3, save=packed, options={"save_frozen": True})
    check_packed(packed)
    rest, _ = run("ddp", "nf4", base, steps=6, ckpt_path=packed)
    assert rest == pytest.approx(found[0][0], abs=5e-6)
    return found


@ranks(1, deadline=300)
def _resume_alone(base: str, folder: str, saved: list[tuple[list[float], dict[str, str]]]) -> None:
    for (saver, quantization, _, readers), expected in zip(ROUTES, saved, strict=True):
        check_readers(base, Path(folder) / f"{saver}.ckpt", quantization, readers, expected)


def check_readers(base: str, path: Path, quantization: Any, readers: list[Reader], saved: Any) -> None:
    losses, state = saved
    for name, kind in readers:
        look = Look()
        found, _ = run(name, quantization, base, steps=6, kind=kind, ckpt_path=path, callbacks=[look])
        assert trained(look.seen) == state, name
        # Other strategies and numbers of ranks sum in another order: FP32 rounding, a few units of 2**-24 relative to
        # a loss of 5.5 after three steps.
        assert found == pytest.approx(losses, abs=5e-6), name


def check_left_out(path: Path, base: str, *, quantised: bool) -> None:
    manifest = read_manifest(path)
    assert manifest.base is not None
    assert manifest.base.folder == base
    assert not [name for name in manifest.tensors if name.startswith("model.") and "lora_" not in name]
    # Nine of each layer, embedding, last norm and head.
    assert len(manifest.base.tensors) == 2 * 9 + 3
    assert set(manifest.base.files) == {"config.json", "model.safetensors"}
    assert (manifest.quantization is not None) == quantised


def check_packed(path: Path) -> None:
    manifest = read_manifest(path)
    assert manifest.base is None
    assert any(name.endswith(".base_layer.weight.absmax") for name in manifest.tensors)
    assert "model.model.base_model.model.lm_head.weight" in manifest.tensors


@pytest.mark.slow
def test_adapters_go_on_under_every_strategy(tmp_path: Path, folder: str) -> None:
    from safetensors.torch import load_file

    saved = _save(folder, str(tmp_path))
    for saver, quantization, *_ in ROUTES:
        check_left_out(tmp_path / f"{saver}.ckpt", folder, quantised=quantization is not None)
    _resume_alone(folder, str(tmp_path), saved)
    # A quantised base can be saved packed, and is merged unpacked.
    found = {}
    for name in ("packed", "zero3"):
        merge_checkpoint(tmp_path / f"{name}.ckpt", tmp_path / name)
        found[name] = load_file(tmp_path / name / "model.safetensors")
    plain = load_file(Path(folder) / "model.safetensors")
    for tensors in found.values():
        assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {n: (t.shape, t.dtype) for n, t in plain.items()}
    # The base that lies in the checkpoint and the one made again from the folder are the same numbers.
    assert all(torch.equal(found["packed"][n], found["zero3"][n]) for n in plain)


@ranks(2, deadline=240)
def _callbacks(base: str, folder: str) -> None:
    out = Path(folder)
    callbacks = [
        ShardedCheckpoint(dirpath=str(out / "checkpoints"), every_n_train_steps=2),
        MergeShardedCheckpoint(str(out / "merged"), dtype="float32"),
        ExportForInference(str(out / "model"), dtype="float32"),
        ExportForInference(str(out / "adapter"), format="adapter"),
    ]
    run("zero3", "nf4", base, steps=2, callbacks=callbacks, enable_checkpointing=True)
    assert all(callback.report is not None for callback in callbacks[2:])  # type: ignore[attr-defined]
    # Others are exported afterwards, in one process.
    for name, quantization in OTHERS:
        run(name, quantization, base, steps=2, save=out / f"{name}.ckpt")


# Strategy and quantisation.
OTHERS: list[tuple[str, Any]] = [("zero2", None), ("zero3-offload", "int8")]


@pytest.mark.slow
def test_checkpoints_are_merged_and_exported(tmp_path: Path, folder: str) -> None:
    from safetensors.torch import load_file

    _callbacks(folder, str(tmp_path))
    _same_weights(tmp_path / "merged", tmp_path / "model", folder)
    checkpoint = next((tmp_path / "checkpoints").glob("*.ckpt"))
    with reload_here():
        assert export_checkpoint(checkpoint, tmp_path / "adapter-again", format="adapter").verified
    _same_adapter(tmp_path / "adapter", tmp_path / "adapter-again", folder)
    for name, quantization in OTHERS:
        checkpoint, merged, exported = (tmp_path / f"{name}{end}" for end in (".ckpt", "-merged", "-exported"))
        merge_checkpoint(checkpoint, merged, dtype="float32")
        with reload_here():
            form: dict[str, Any] = {"format": "adapter"} if quantization is None else {"dtype": "float32"}
            assert export_checkpoint(checkpoint, exported, **form).verified
        if quantization is None:
            _same_adapter(exported, exported, folder)
            assert all(t.isfinite().all() and t.numel() for t in load_file(merged / "model.safetensors").values())
        else:
            _same_weights(merged, exported, folder)


def _same_weights(one: Path, other: Path, base: str) -> None:
    from safetensors.torch import load_file

    first, second, plain = (load_file(Path(path) / "model.safetensors") for path in (one, other, base))
    assert first.keys() == second.keys() == plain.keys()
    for key, tensor in plain.items():
        assert first[key].shape == tensor.shape
        assert torch.equal(first[key], second[key])


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
