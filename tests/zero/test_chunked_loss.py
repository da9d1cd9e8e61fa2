"""A loss in chunks under ZeRO: the head's weight is gathered for all chunks, also when they are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.zero import ZeROStrategy
from tests.harness.models import quiet_trainer, tiny_config
from tests.harness.ranks import ranks
from tests.parallel.test_token_loss import Uneven

pytestmark = pytest.mark.usefixtures("ops")
# Half a unit in the last place after each of two updates, and gradients known to 1e-5 of a change of 1e-3 a step.
ROUNDING = 2 * torch.finfo(torch.float32).eps


class Module(CausalLM):
    weights: dict[str, Tensor]

    def on_train_end(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        self.weights = {name: safe_get_full_fp32_param(p).clone() for name, p in trained}


def trained(kind: str, loss: Any, rank: int, **options: Any) -> tuple[dict[str, Tensor], float]:
    # SGD: a weight's change is its gradient.
    module = Module(
        tiny_config(kind, hidden=32, layers=2), lr=0.1, optimizer="sgd", loss=loss, loss_chunk=7, scheduler="constant"
    )
    sampler: Any = DistributedSampler(Uneven(), 2, rank, shuffle=False)
    trainer = quiet_trainer(
        strategy=ZeROStrategy(precision="32-true", **options),
        max_epochs=1,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(Uneven(), batch_size=4, sampler=sampler))
    return module.weights, float(trainer.logged_metrics["train_loss"])


@ranks(2)
def chunks_under_zero() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    lora = LoraSettings(r=2, alpha=4.0)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"stage": 3}),
        ("gemma2", {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}),
        ("llama", {"stage": 2, "lora": lora}),
    ]
    for kind, options in cases:
        theirs, expected = trained(kind, "huggingface", rank, **options)
        ours, loss = trained(kind, "chunked", rank, **options)
        assert loss == pytest.approx(expected, rel=1e-6), options
        assert ours.keys() == theirs.keys()
        for name, weight in theirs.items():
            allowed = ROUNDING * float(weight.abs().max()) + 1e-6
            assert (ours[name] - weight).abs().max() <= allowed, (options, name)


def test_steps_in_chunks_are_those_at_once() -> None:
    chunks_under_zero()
