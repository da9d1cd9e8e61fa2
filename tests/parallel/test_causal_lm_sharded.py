"""CausalLM of a pretrained folder: the same training whether a strategy reads the weights by shards or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.models.lazy import is_lazy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, loader, quiet_trainer, save_tiny_model
from tests.harness.ranks import ranks

SMALL = {"layers": 1, "hidden": 32}


class Recorder(CausalLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.was_lazy = False

    @override
    def configure_model(self) -> None:
        super().configure_model()
        self.was_lazy = self.was_lazy or is_lazy(self)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.logged_metrics["train_loss"]))


def fit(folder: Path, strategy: Any, **settings: Any) -> Recorder:
    module = Recorder(folder, lr=2e-2, scheduler="cosine", warmup=2, weight_decay=0.1, **settings)
    data = loader(Tokens(4, length=16), batch_size=2, rank=dist.get_rank(), world_size=dist.get_world_size())
    trainer = quiet_trainer(strategy=strategy, max_steps=6, max_epochs=-1, log_every_n_steps=1, gradient_clip_val=1.0)
    trainer.fit(module, data)
    assert not is_lazy(module)
    return module


@ranks(2)
def same_curve(folder: Path) -> None:
    ddp = fit(folder, "ddp")
    assert not ddp.was_lazy
    fsdp = fit(folder, FSDPBF16Strategy("32-true"))
    assert fsdp.was_lazy
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-5)
    assert fsdp.losses[-1] < fsdp.losses[0] - 0.3


@ranks(2)
def other_settings(folder: Path) -> None:
    ddp = fit(folder, "ddp")
    mixed = fit(folder, FSDPBF16Strategy())
    # BF16 keeps 8 bits: 0.4 % of each product, and the loss is a mean over many.
    assert mixed.losses == pytest.approx(ddp.losses, rel=1e-2)
    frozen = fit(folder, FSDPBF16Strategy("32-true"), freeze=["model.embed_tokens.*"])
    assert frozen.losses[-1] < frozen.losses[0] - 0.1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_lazy_and_whole_loading_train_alike(tmp_path: Path, kind: str) -> None:
    same_curve(save_tiny_model(tmp_path, kind, **SMALL))


@ranks(2)
def same_continuation(folder: Path) -> None:
    rank = dist.get_rank()
    # Rank 1 has prompts of another length than rank 0, and may come to an end of sequence earlier.
    ids = torch.arange(3, 27).view(4, 6)[:, : 6 - 2 * rank]
    rows: list[dict[str, Tensor]] = [{"input_ids": row} for row in ids]
    data: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    module = CausalLM(folder, max_new_tokens=6)
    sharded = quiet_trainer(strategy=FSDPBF16Strategy("32-true")).predict(module, data)
    alone = CausalLM(folder)
    alone.configure_model()
    alone.model.eval()
    for batch, ours in zip(data, sharded, strict=True):
        theirs = alone.model.generate(**batch, attention_mask=torch.ones_like(batch["input_ids"]), max_new_tokens=6)
        assert ours[:, : theirs.shape[1]].tolist() == theirs.tolist()


def test_bf16_and_frozen_parameters(tmp_path: Path) -> None:
    other_settings(save_tiny_model(tmp_path, **SMALL))


def test_sharded_models_continue_prompts_of_any_length(tmp_path: Path) -> None:
    same_continuation(save_tiny_model(tmp_path, **SMALL))
