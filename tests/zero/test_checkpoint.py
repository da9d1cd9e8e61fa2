"""Checkpoints of ZeRO: every stage, offloaded or not, and every other strategy read each other's, at any world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.strategies._checkpoint_state import model_state, optimizer_state
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.zero import ZeROStrategy
from tests.checkpoint.runs import Groups, Scheduled, Unused, batches, digest, fit, mean_losses
from tests.harness.models import UserModule, quiet_trainer
from tests.harness.ranks import ranks
from tests.zero.states import Look, comparable, state_digests

pytestmark = pytest.mark.usefixtures("ops")

Strategy = Callable[[], Any]


def zero(stage: int, precision: str = "bf16-mixed", *, offload: bool = False) -> Strategy:
    where: dict[str, Any] = {"offload_optimizer": "cpu"} if offload else {}
    if offload and stage == 3:
        where["offload_params"] = "cpu"
    return lambda: ZeROStrategy(stage, precision, **where)  # type: ignore[arg-type]


STRATEGIES: dict[str, Strategy] = {
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3),
    "zero1-offload": zero(1, offload=True),
    "zero2-offload": zero(2, offload=True),
    "zero3-offload": zero(3, offload=True),
    "fsdp": FSDPBF16Strategy,
    "ddp": DDPBF16Strategy,
}


def saved_by(name: str, path: Path, module: UserModule) -> dict[str, str]:
    """Digests of what a run of three steps under a strategy has saved."""
    trainer = fit(module, steps=3, save=path, strategy=STRATEGIES[name])
    return state_digests(trainer)


def resumed_by(name: str, path: Path, module: UserModule, steps: int = 4) -> dict[str, str]:
    look = Look()
    fit(module, steps=steps, ckpt_path=path, strategy=STRATEGIES[name], callbacks=[look])
    return look.seen


@ranks(2, deadline=240)
def save_and_resume(folder: str, saver: str, readers: list[str]) -> dict[str, str]:
    path = Path(folder) / f"{saver}.ckpt"
    saved = saved_by(saver, path, Scheduled("qwen3"))
    assert len(saved) > 200
    for name in readers:
        assert resumed_by(name, path, Scheduled("qwen3")) == saved, name
    return saved


@ranks(1, deadline=240)
def resume_alone(folder: str, saver: str, readers: list[str], saved: dict[str, str]) -> None:
    for name in readers:
        assert resumed_by(name, Path(folder) / f"{saver}.ckpt", Scheduled("qwen3")) == saved, name


@pytest.mark.slow
def test_stage_2_is_read_by_every_strategy_at_two_ranks_and_at_one(tmp_path: Path) -> None:
    saved = save_and_resume(str(tmp_path), "zero2", ["zero1", "zero3", "zero3-offload", "fsdp", "ddp"])
    resume_alone(str(tmp_path), "zero2", ["zero1-offload", "zero3", "ddp"], saved)


@pytest.mark.slow
def test_stage_3_with_offload_is_read_by_every_strategy_at_two_ranks_and_at_one(tmp_path: Path) -> None:
    saved = save_and_resume(str(tmp_path), "zero3-offload", ["zero1", "zero2-offload", "zero3", "fsdp"])
    resume_alone(str(tmp_path), "zero3-offload", ["zero2", "fsdp"], saved)


@pytest.mark.slow
def test_stage_1_is_read_by_other_stages(tmp_path: Path) -> None:
    # In BF16 without offload DeepSpeed has an optimizer class of its own for it.
    save_and_resume(str(tmp_path), "zero1", ["zero1-offload", "zero3"])


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["fsdp", "ddp"])
def test_every_stage_reads_checkpoints_of_other_strategies(tmp_path: Path, saver: str) -> None:
    saved = save_and_resume(str(tmp_path), saver, ["zero1", "zero2-offload", "zero3"])
    resume_alone(str(tmp_path), saver, ["zero2", "zero3-offload"], saved)


@ranks(2, deadline=240)
def _losses_go_on(folder: str) -> None:
    modules: list[tuple[str, Callable[[], UserModule]]] = [
        ("zero1", Scheduled),
        ("zero2-offload", Groups),
        ("zero3", lambda: Scheduled("qwen3")),
        ("zero3-offload", Unused),
    ]
    for name, module in modules:
        whole, path = module(), Path(folder) / f"{name}.ckpt"
        fit(whole, steps=6, strategy=STRATEGIES[name])
        fit(module(), steps=3, save=path, strategy=STRATEGIES[name])
        rest = module()
        fit(rest, steps=6, ckpt_path=path, strategy=STRATEGIES[name])
        assert mean_losses(rest) == mean_losses(whole)[3:], name
        assert read_manifest(path).mesh == {"dp_shard": 2}


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one(tmp_path: Path) -> None:
    _losses_go_on(str(tmp_path))


@ranks(2, deadline=240)
def _evaluates(folder: str) -> None:
    path = Path(folder) / "a.ckpt"
    trainer = fit(Scheduled("qwen3"), steps=3, save=path, strategy=STRATEGIES["zero3"])
    after = [r["val_loss"] for r in trainer.validate(trainer.lightning_module, batches(), verbose=False)]
    for name in ("zero3", "zero2"):
        module = Scheduled("qwen3")
        trainer = quiet_trainer(strategy=STRATEGIES[name]())
        found = [r["val_loss"] for r in trainer.validate(module, batches(), ckpt_path=path, verbose=False)]
        # Without an optimizer the weights are the same BF16 numbers, rounded from the masters.
        assert found == after, name


def test_a_checkpoint_is_evaluated_without_an_optimizer(tmp_path: Path) -> None:
    _evaluates(str(tmp_path))


@ranks(2, deadline=240)
def _weights_alone(folder: str) -> None:
    path = Path(folder) / "a.ckpt"
    trainer = fit(Scheduled("qwen3"), steps=3, strategy=STRATEGIES["zero2"])
    saved = {name: value for name, value in state_digests(trainer).items() if name.startswith("model.")}
    trainer.save_checkpoint(path, weights_only=True)
    look = Look()
    for name in ("zero3", "zero1"):
        fit(Scheduled("qwen3"), steps=1, ckpt_path=path, strategy=STRATEGIES[name], callbacks=[look])
        assert {name: value for name, value in look.seen.items() if name.startswith("model.")} == saved


def test_weights_alone_start_a_run_from_their_masters(tmp_path: Path) -> None:
    _weights_alone(str(tmp_path))


@ranks(2, deadline=240)
def _merge(folder: str) -> None:
    for name in ("zero1", "zero3-offload"):
        path = Path(folder) / f"{name}.ckpt"
        trainer = fit(Scheduled("qwen3"), steps=2, save=path, strategy=STRATEGIES[name])
        values = {n: v for n, v in state_digests(trainer).items() if n.startswith("model.")}
        if trainer.is_global_zero:
            from safetensors.torch import load_file

            merge_checkpoint(path, Path(folder) / name)
            merged = load_file(Path(folder) / name / "model.safetensors")
            assert {f"model.model.{n}": digest(v) for n, v in merged.items()}.items() <= values.items()
            assert all(v.dtype == torch.float32 and v.numel() for v in merged.values())
        trainer.strategy.barrier()


@pytest.mark.slow
def test_the_merged_folder_holds_the_masters(tmp_path: Path) -> None:
    _merge(str(tmp_path))
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@ranks(2, deadline=240)
def _resume_from_file(path: str, saved: dict[str, str]) -> None:
    # Not stage 3: parameters that are cut have one axis there, by which this module forms its groups.
    for name in ("zero2", "zero1-offload"):
        assert resumed_by(name, Path(path), Groups()) == saved, name


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_ordinary_checkpoint_file_is_read(tmp_path: Path) -> None:
    module = Groups()
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(module, batches())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (optimizer,) = trainer.optimizers
    flat = {f"model.{name}": value for name, value in model_state(module).items()}
    flat |= {f"optimizer_0.{name}": value for name, value in optimizer_state(module, optimizer).items()}
    _resume_from_file(str(tmp_path / "a.ckpt"), comparable(flat))


class Wide(Scheduled):
    """Large enough for what DeepSpeed swaps: tensors below 1 MiB stay in memory without a word."""

    def __init__(self) -> None:
        super().__init__("llama", hidden=320, layers=2)


@ranks(2, deadline=300)
def _on_disk(folder: str) -> None:
    # Several vectors on each rank, so that one is read while the others are away.
    nvme: dict[str, Any] = {"offload_optimizer": "nvme", "nvme_path": f"{folder}/swap", "sub_group_size": 400_000}
    disk: Strategy = lambda: ZeROStrategy(3, **nvme)  # noqa: E731
    whole, rest, look, path = Wide(), Wide(), Look(), Path(folder) / "a.ckpt"
    fit(whole, steps=5, strategy=disk)
    saved = state_digests(fit(Wide(), steps=3, save=path, strategy=disk))
    # Of both fits: masters and two moments of two vectors on two ranks; a third one is too small to be swapped.
    assert len(list(Path(folder).rglob("*.swp"))) == 24
    fit(rest, steps=5, ckpt_path=path, strategy=disk, callbacks=[look])
    assert look.seen == saved
    assert mean_losses(rest) == mean_losses(whole)[3:]
    assert resumed_by("fsdp", path, Wide()) == saved
    path = Path(folder) / "fsdp.ckpt"
    saved = saved_by("fsdp", path, Wide())
    fit(Wide(), steps=4, ckpt_path=path, strategy=disk, callbacks=[look])
    assert look.seen == saved


@pytest.mark.slow
def test_an_optimizer_on_disk_is_saved_and_resumed(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("libaio is not installed")
    _on_disk(str(tmp_path))
