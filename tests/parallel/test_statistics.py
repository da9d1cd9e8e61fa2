"""Layers with running statistics (batch normalisation): as under DDP, also with BF16 compute."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import VOCAB, Tokens, loader, quiet_trainer
from tests.harness.ranks import ranks


class Normalised(L.LightningModule):
    """Batch normalisation inside repeated blocks and as a child of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(2))
        )
        self.last = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCAB)
        self.losses: list[float] = []
        self.evaluated: list[float] = []

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.last(self.blocks(self.embedding(batch["input_ids"]).flatten(0, 1)))
        return nn.functional.cross_entropy(self.head(hidden).float(), batch["labels"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.evaluated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: Any) -> Normalised:
    module = Normalised()
    share = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=0, val_check_interval=3)
    trainer.fit(module, loader(Tokens(24), batch_size=2, **share), loader(Tokens(8, seed=2), batch_size=2, **share))
    return module


def whole(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}


@ranks(2)
def test_batch_normalisation_is_ddp_bit_for_bit() -> None:
    expected, ours = train(DDPStrategy()), train(FSDPBF16Strategy("32-true"))
    assert ours.losses == expected.losses
    # Evaluation sees the statistics of the first rank on every rank.
    assert ours.evaluated == expected.evaluated
    reference = whole(expected)
    for name, value in whole(ours).items():
        # DDP leaves the other ranks' last update of the statistics alone, and so do we.
        assert torch.equal(value, reference[name]), name


@ranks(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_statistics_stay_in_float32_under_bf16(precision: Any) -> None:
    module = train(FSDPBF16Strategy(precision))
    assert module.last.running_mean.dtype == torch.float32
    # Two of the 24 random sequences a step: six steps of SGD lower the loss of a fresh model by far more than rounding.
    assert module.losses[-1] < module.losses[0]
    assert all(torch.isfinite(v).all() for v in whole(module).values())
