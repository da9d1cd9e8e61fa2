"""What users of Lightning expect of any strategy."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import lightning_swift  # noqa: F401  # registers the name
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import fit, mean_losses, norm_of, single_process


def data(n: int = 64, batch_size: int = 4) -> Any:
    return loader(Tokens(n), batch_size=batch_size, rank=dist.get_rank(), world_size=dist.get_world_size())


def shared(path: Path) -> Path:
    """The folder of rank 0, for all ranks."""
    box = [str(path)]
    dist.broadcast_object_list(box)
    return Path(box[0])


@ranks(2)
def test_logged_values_are_means_over_ranks() -> None:
    module = UserModule()
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), max_steps=1, num_sanity_val_steps=0)
    trainer.fit(module, data(8))
    assert trainer.callback_metrics["loss"].item() == pytest.approx(mean_losses(module)[0], rel=1e-6)  # float32


class LogsNorm(UserModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.trainer.strategy.gradient_norm())


@ranks(2)
def test_the_norm_of_the_gradients_can_be_logged() -> None:
    module = LogsNorm()
    trainer = quiet_trainer(strategy=FSDPBF16Strategy("32-true"), max_steps=1, num_sanity_val_steps=0)
    trainer.fit(module, data(8))
    _, gradients, _ = single_process(tiny_model().train(), world=2, steps=1)
    # A sum of 2e5 squares in float32, in another order.
    assert trainer.callback_metrics["norm"].item() == pytest.approx(norm_of(gradients), rel=2e-6)


class Scheduled(UserModule):
    """Warm-up by the step, and a note of each learning rate that was used."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@ranks(2)
def test_schedulers_step_with_the_optimizer(tmp_path: Path) -> None:
    module = Scheduled()
    trainer = quiet_trainer(
        strategy=FSDPBF16Strategy(),
        max_steps=4,
        accumulate_grad_batches=2,
        callbacks=[LearningRateMonitor()],
        logger=CSVLogger(shared(tmp_path)),
    )
    trainer.fit(module, data())
    assert module.rates == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert trainer.global_step == 4


@ranks(2)
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    folder = shared(tmp_path)
    keep = ModelCheckpoint(folder, filename="{step}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = quiet_trainer(
        strategy=FSDPBF16Strategy(), max_epochs=4, callbacks=[keep], enable_checkpointing=True, limit_train_batches=2
    )
    trainer.fit(UserModule(), data(), data(8))
    dist.barrier()
    # The loss falls, so the best two are the latest two.
    assert {path.name for path in folder.glob("*.ckpt")} == {"step=6.ckpt", "step=8.ckpt", "last.ckpt"}
    assert Path(keep.best_model_path).name == "step=8.ckpt"
    again = UserModule()
    resumed = quiet_trainer(strategy=FSDPBF16Strategy(), max_epochs=5, limit_train_batches=2)
    resumed.fit(again, data(), data(8), ckpt_path=str(folder / "last.ckpt"))
    assert resumed.global_step == 10
    assert len(again.losses) == 2


class Stuck(UserModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Only the second rank sees it fall: the decision must be taken together.
        self.log("val_loss", 1.0 - 0.1 * self.current_epoch * dist.get_rank(), sync_dist=True)


@ranks(2)
def test_early_stopping_stops_all_ranks_together() -> None:
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.2, check_on_train_epoch_end=False)
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), max_epochs=9, callbacks=[stop], limit_train_batches=1)
    trainer.fit(Stuck(), data(), data(8))
    assert trainer.current_epoch == 2


class Manual(UserModule):
    """Accumulates and steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_manual_optimization_with_accumulation_and_clipping() -> None:
    module, _ = fit(Manual(), FSDPBF16Strategy("32-true"), steps=5, batch=2)
    losses, _, _ = single_process(tiny_model().train(), world=2, steps=5, accumulate=2, batch=2, clip_norm=0.3)
    # Five steps of float32 in another order; test_parity says more.
    assert mean_losses(module) == pytest.approx(losses, abs=3e-5)


@ranks(2)
def test_an_incomplete_window_of_accumulation_is_stepped_and_synchronised() -> None:
    # Eight micro-batches by three: the third window has two.
    for without_sync in (False, True):
        strategy = FSDPBF16Strategy("32-true", accumulate_without_sync=without_sync)
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=3)
        module = UserModule()
        trainer.fit(module, data())
        assert trainer.global_step == 3
        weights = [p.full_tensor() for p in module.parameters()]
        assert all(bool(torch.isfinite(w).all()) for w in weights)


class Unused(UserModule):
    """A head that no loss uses yet, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)


@ranks(2)
def test_parameters_without_gradients_do_not_disturb() -> None:
    expected = fit(UserModule(), FSDPBF16Strategy(), steps=3)[0].losses
    module, recorded = fit(Unused(), FSDPBF16Strategy(), steps=3)
    assert module.losses == expected
    assert not [name for name in recorded.gradients if "unused" in name or "frozen" in name]


@ranks(1)
def test_one_rank_needs_no_other() -> None:
    module = UserModule()
    trainer = quiet_trainer(
        strategy="swift_fsdp_bf16", max_steps=8, gradient_clip_val=1.0, accumulate_grad_batches=2, val_check_interval=2
    )
    trainer.fit(module, data(), data(8))
    trainer.validate(module, data(8), verbose=False)
    assert module.losses[-1] < module.losses[0]
    assert trainer.strategy.mesh_sizes.shape == (1, 1, 1, 1)


SCRIPT = """
    import sys

    import lightning as L
    import lightning_swift
    import torch.distributed as dist
    from tests.harness.models import Tokens, UserModule
    from torch.utils.data import DataLoader

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(devices=2, {accelerator} strategy="swift_fsdp_bf16", max_steps=2, **quiet)
    module = UserModule()
    trainer.fit(module, DataLoader(Tokens(16), batch_size=2))
    share = trainer.train_dataloader.sampler.rank
    # One write, so that the lines of two processes do not mix.
    sys.stdout.write(f"LOSS {{dist.get_rank()}} {{dist.get_world_size()}} {{len(module.losses)}} {{share}}\\n")
"""


@pytest.mark.slow
def test_the_trainer_starts_its_own_processes(tmp_path: Path) -> None:
    # One device, which starts no process, is what dry runs of recipes have.
    accelerator = 'accelerator="cpu",' if torch.cuda.is_available() else ""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(accelerator=accelerator)))
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = sorted(line for line in result.stdout.splitlines() if line.startswith("LOSS"))
    assert lines == ["LOSS 0 2 2 0", "LOSS 1 2 2 1"], result.stdout
