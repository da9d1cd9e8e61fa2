"""Checkpoints of ZeRO: every stage, offloaded or not, and every other strategy read each other's, at any world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.errors import CheckpointMismatchError
from lightning_swift.strategies._checkpoint_state import model_state, optimizer_state
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.zero import ZeROStrategy
from tests.checkpoint.runs import Groups, SaveAt, Scheduled, Unused, batches, digest, fit, mean_losses
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


def small() -> UserModule:
    """With tied weights."""
    return Scheduled("qwen3", layers=2)


def saved_by(name: str, path: Path, module: UserModule) -> dict[str, str]:
    """Digests of what a run of three steps under a strategy has saved."""
    trainer = fit(module, steps=3, save=path, strategy=STRATEGIES[name])
    return state_digests(trainer)


def resumed_by(name: str, path: Path, module: UserModule, steps: int = 4) -> dict[str, str]:
    look = Look()
    fit(module, steps=steps, ckpt_path=path, strategy=STRATEGIES[name], callbacks=[look])
    return look.seen


# What saves at two ranks, and what reads that at two and at one.
ROUTES: dict[str, tuple[list[str], list[str]]] = {
    # In BF16 without offload DeepSpeed has an optimizer class of its own for stage 1.
    "zero1": (["zero1-offload", "zero3"], []),
    "zero2": (["zero1", "zero3-offload", "ddp"], ["zero1-offload", "zero3"]),
    "zero3-offload": (["zero2-offload", "zero3", "fsdp"], ["zero2", "fsdp"]),
    "fsdp": (["zero1", "zero3"], ["zero2-offload"]),
    "ddp": (["zero2", "zero3-offload"], ["zero3"]),
}


@ranks(2, deadline=300)
def save_and_resume(folder: str) -> dict[str, dict[str, str]]:
    states = {}
    for saver, (readers, _) in ROUTES.items():
        path = Path(folder) / f"{saver}.ckpt"
        states[saver] = saved = saved_by(saver, path, small())
        assert len(saved) > 140
        for name in readers:
            assert resumed_by(name, path, small()) == saved, (saver, name)
    return states


@ranks(1, deadline=300)
def resume_alone(folder: str, states: dict[str, dict[str, str]]) -> None:
    for saver, (_, readers) in ROUTES.items():
        for name in readers:
            assert resumed_by(name, Path(folder) / f"{saver}.ckpt", small()) == states[saver], (saver, name)


@pytest.mark.slow
def test_every_strategy_reads_every_other_at_two_ranks_and_at_one(tmp_path: Path) -> None:
    states = save_and_resume(str(tmp_path))
    resume_alone(str(tmp_path), states)
    for saver in ("zero1", "zero3-offload"):
        check_merged(tmp_path / f"{saver}.ckpt", tmp_path / saver, states[saver])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def check_merged(checkpoint: Path, output: Path, state: dict[str, str]) -> None:
    """The merged folder holds the masters."""
    from safetensors.torch import load_file

    merge_checkpoint(checkpoint, output)
    merged = load_file(output / "model.safetensors")
    assert {f"model.model.{n}": digest(v) for n, v in merged.items()}.items() <= state.items()
    assert all(v.dtype == torch.float32 and v.numel() for v in merged.values())


@ranks(2, deadline=240)
def _losses_go_on(folder: str) -> None:
    modules: list[tuple[str, Callable[[], UserModule]]] = [
        ("zero1", lambda: Scheduled(layers=2)),
        ("zero2-offload", lambda: Groups(layers=2)),
        ("zero3", small),
        ("zero3-offload", lambda: Unused(layers=2)),
    ]
    for name, module in modules:
        whole, path = module(), Path(folder) / f"{name}.ckpt"
        # Saving in the middle must not disturb the run itself.
        fit(whole, steps=6, strategy=STRATEGIES[name], callbacks=[SaveAt(path, 3)])
        rest = module()
        trainer = fit(rest, steps=6, ckpt_path=path, strategy=STRATEGIES[name])
        if name == "zero2-offload":
            # The checkpoint has tensors, as torch's own optimizers do.
            assert type(trainer.strategy._partitions.states(0)["step"]) is int
        assert mean_losses(rest) == mean_losses(whole)[3:], name
        assert read_manifest(path).mesh == {"dp_shard": 2}


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_the_uninterrupted_one(tmp_path: Path) -> None:
    _losses_go_on(str(tmp_path))


@ranks(2, deadline=240)
def _evaluates(folder: str) -> None:
    path, weights = Path(folder) / "a.ckpt", Path(folder) / "weights.ckpt"
    trainer = fit(small(), steps=3, save=path, strategy=STRATEGIES["zero3"])
    saved = {name: value for name, value in state_digests(trainer).items() if name.startswith("model.")}
    trainer.save_checkpoint(weights, weights_only=True)
    after = [r["val_loss"] for r in trainer.validate(trainer.lightning_module, batches(), verbose=False)]
    for name in ("zero3", "zero2"):
        trainer = quiet_trainer(strategy=STRATEGIES[name]())
        found = [r["val_loss"] for r in trainer.validate(small(), batches(), ckpt_path=path, verbose=False)]
        # Without an optimizer the weights are the same BF16 numbers, rounded from the masters.
        assert found == after, name
    # One name is in the checkpoint. Where the weights are two, the other would keep what it was initialised with.
    with pytest.raises(CheckpointMismatchError, match=r"lm_head\.weight"):
        trainer.validate(UserModule("qwen3", layers=2, tie=False), batches(), ckpt_path=path, verbose=False)
    look = Look()
    for name in ("zero3", "zero1"):
        fit(small(), steps=1, ckpt_path=weights, strategy=STRATEGIES[name], callbacks=[look])
        assert {name: value for name, value in look.seen.items() if name.startswith("model.")} == saved


def test_a_checkpoint_is_evaluated_and_its_weights_alone_start_a_run(tmp_path: Path) -> None:
    _evaluates(str(tmp_path))


class Late(Unused):
    """The head gets its first gradient in the second step: the optimizer counts its steps apart."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.head.weight.sum() + self.head.bias.sum() if self.trainer.global_step else loss


@ranks(2, deadline=240)
def _resume_from_file(folder: str, saved: dict[str, str], loss: float) -> None:
    for name in ("zero2", "zero3-offload"):
        module = Groups(layers=2)
        assert resumed_by(name, Path(folder) / "groups.ckpt", module) == saved, name
        # BF16 has 8 bits; the three steps have brought 0.34.
        assert mean_losses(module)[0] == pytest.approx(loss, abs=1e-2), name
    found = resumed_by("zero2", Path(folder) / "unused.ckpt", Late(layers=2))
    assert found["optimizer_0.state.head.weight.exp_avg"] == digest(torch.zeros(5, 7))
    # One counter for all of a flat vector would be wrong for some of it.
    with pytest.raises(CheckpointMismatchError, match="several values of step"):
        resumed_by("zero2", Path(folder) / "late.ckpt", Late(layers=2))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_ordinary_checkpoint_file_is_read(tmp_path: Path) -> None:
    for name, module in (("late", Late(layers=2)), ("groups", Groups(layers=2))):
        trainer = quiet_trainer(
            max_steps=3, callbacks=[SaveAt(tmp_path / "unused.ckpt", 1)] if name == "late" else None
        )
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
    (optimizer,) = trainer.optimizers
    flat = {f"model.{name}": value for name, value in model_state(module).items()}
    flat |= {f"optimizer_0.{name}": value for name, value in optimizer_state(module, optimizer).items()}
    with torch.no_grad():
        loss = float(module.model(**next(iter(batches())), use_cache=False).loss)
    _resume_from_file(str(tmp_path), comparable(flat), loss)


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
    # Masters and two moments of two vectors; a third one is too small to be swapped. Each engine on each of two ranks
    # has a folder; those of one fit, which nothing needs any more, may be gone.
    swapped = [len(list(own.rglob("*.swp"))) for own in Path(f"{folder}/swap").glob("*/")]
    assert len(swapped) in (2, 4)
    assert set(swapped) == {6}
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
