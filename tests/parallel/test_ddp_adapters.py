"""LoRA and QLoRA under DDP are those of one plain process, whatever the ranks, the loading and the evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.quantise import quantised_layers
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models.lazy import lazy_pretrained
from lightning_swift.strategies.ddp import DDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, save_tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import Lora, Recorder, fit, mean_losses, single_process
from tests.parallel.test_parity import assert_gradients

LORA = LoraSettings(r=4, alpha=8.0)
# To 5 decimals: over 20 steps float32 sums over ranks in another order stay below that where only adapters train.
FIVE_DECIMALS = 1e-5


class FromFolder(UserModule):
    """A user's module over a pretrained folder, with an optimizer over all parameters."""

    def __init__(self, folder: str, *, lazy: bool = True) -> None:
        super().__init__(folder=folder)
        self.lazy = lazy
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self.model is None and self.lazy:
            self.model = lazy_pretrained(self.folder).train()
        super().configure_model()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(float(self.model(**batch, use_cache=False).loss))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.01)


def reference(folder: str, settings: AdapterSettings, *, world: int, accumulate: int = 1) -> Any:
    """A plain loop in one process over a model with the same adapters."""
    module = FromFolder(folder, lazy=False)
    module.configure_model()
    apply_adapters(module, settings, compute_dtype=torch.float32)
    return single_process(module.model.train(), world=world, steps=20 // accumulate, accumulate=accumulate)


def check_equal(folder: str, quantization: Any, accumulate: int, *, ways: tuple[bool, ...] = (True, False)) -> None:
    world = dist.get_world_size()
    settings = AdapterSettings(LORA, quantization)
    losses, gradients, _ = reference(folder, settings, world=world, accumulate=accumulate)
    for lazy in ways:
        module, recorder = FromFolder(folder, lazy=lazy), Recorder()
        strategy = DDPBF16Strategy("32-true", lora=LORA, quantization=quantization)
        # An evaluation before the first step and within must change nothing: packing would be seen here.
        trainer = quiet_trainer(
            strategy=strategy,
            max_steps=20 // accumulate,
            accumulate_grad_batches=accumulate,
            val_check_interval=4,
            check_val_every_n_epoch=None,
            limit_val_batches=1,
            callbacks=[recorder],
        )
        data = loader(Tokens(), batch_size=4, rank=dist.get_rank(), world_size=world)
        trainer.fit(module, data, data)
        assert bool(quantised_layers(module)) == (quantization is not None)
        assert len(module.validated) > 3
        assert module.validated[-1] < module.validated[0]
        assert_gradients(recorder.gradients, gradients)
        assert mean_losses(module) == pytest.approx(losses, abs=FIVE_DECIMALS), (quantization, lazy)
        held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        assert held == [p for p in module.parameters() if p.requires_grad]


@ranks(1)
def one(folder: str) -> None:
    check_equal(folder, "nf4", 1)


@ranks(2)
def two(folder: str) -> None:
    # Both ways of loading: where it is also quantised.
    check_equal(folder, None, 2, ways=(True,))
    check_equal(folder, "nf4", 2)


@pytest.mark.parametrize("run", [one, two], ids=["1", "2"])
def test_fp32_is_one_plain_process(run: Any, tmp_path: Path) -> None:
    run(str(save_tiny_model(tmp_path / "model", layers=2)))


@ranks(2)
def bf16(folder: str) -> None:
    for quantization in (None, "nf4", "int8"):
        # After eight steps the first batch comes again.
        module, _ = fit(FromFolder(folder), DDPBF16Strategy(lora=LORA, quantization=quantization), steps=9)
        kept = {p.dtype for p in module.parameters() if p.requires_grad}
        frozen = {p.dtype for p in module.parameters() if not p.requires_grad}
        assert kept == {torch.float32}
        assert torch.bfloat16 in frozen
        assert torch.float32 not in frozen
        losses = mean_losses(module)
        assert losses[-1] < losses[0]


def test_bf16_keeps_adapters_in_float32_and_trains(tmp_path: Path) -> None:
    bf16(str(save_tiny_model(tmp_path / "model", layers=2)))


@ranks(2)
def test_models_that_differ_between_ranks_are_made_equal_before_they_are_quantised() -> None:
    class Different(UserModule):
        def configure_model(self) -> None:
            new = self.model is None
            super().configure_model()
            if new and dist.get_rank():
                for parameter in self.model.parameters():
                    parameter.data.mul_(2)

    strategy = DDPBF16Strategy("32-true", lora=LORA, quantization="nf4")
    module, _ = fit(Different(), strategy, steps=1)
    expected, _ = fit(UserModule(), DDPBF16Strategy("32-true", lora=LORA, quantization="nf4"), steps=1)
    # The same model on the first rank's data; scales of 4-bit blocks are no parameters, so DDP does not copy them.
    assert module.losses == expected.losses


@ranks(2)
def test_a_second_fit_and_a_second_trainer_keep_the_adapters() -> None:
    module, _ = fit(UserModule(), DDPBF16Strategy(lora=LORA), steps=2)
    names = [name for name, _ in module.named_parameters()]
    trainer = quiet_trainer(strategy=DDPBF16Strategy(lora=LORA))
    data = loader(Tokens(8), batch_size=4, rank=dist.get_rank(), world_size=2)
    assert trainer.validate(module, data, verbose=False)
    fit(module, DDPBF16Strategy(lora=LORA), steps=2)
    assert [name for name, _ in module.named_parameters()] == names
    assert any("lora_A" in name for name in names)


@ranks(2)
def test_adapters_of_the_users_own_are_respected_and_not_doubled() -> None:
    fit(Lora(), DDPBF16Strategy(), steps=1)
    with pytest.raises(ModelError, match="adapters already"):
        fit(Lora(), DDPBF16Strategy(lora=LORA), steps=1)


def test_quantising_without_adapters_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError, match="nothing trains"):
        DDPBF16Strategy(quantization="nf4")
