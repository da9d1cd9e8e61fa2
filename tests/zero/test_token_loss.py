"""CausalLM's loss is exact under ZeRO: the same step for every split into ranks and microbatches, clipping included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.zero import ZeROStrategy
from tests.harness.models import VOCAB, quiet_trainer
from tests.harness.ranks import ranks
from tests.parallel.test_token_loss import CLIP, RELATIVE, Uneven

pytestmark = pytest.mark.usefixtures("ops")

# A weight is known to half a unit in the last place after each of up to 6 updates, and its gradient to RELATIVE.
ROUNDINGS = 6 * torch.finfo(torch.float32).eps
OFFLOADED = {"offload_optimizer": "cpu", "offload_params": "cpu"}
# Steps of accumulation and options, by clipping: each stage both ways, each number of microbatches both ways.
SPLITS: dict[float | None, list[tuple[int, dict[str, Any]]]] = {
    None: [
        (1, {"stage": 1}),
        (4, {"stage": 1}),
        (2, {"stage": 2}),
        (4, {"stage": 3}),
        (1, {"stage": 3, **OFFLOADED}),
    ],
    CLIP: [
        (2, {"stage": 1}),
        (4, {"stage": 2}),
        (1, {"stage": 2, "offload_optimizer": "cpu"}),
        (2, {"stage": 3}),
        (4, {"stage": 3, **OFFLOADED}),
    ],
}


class Module(CausalLM):
    """With plain SGD, so that a weight's change is its gradient; records what each step did."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.norms: list[float] = []
        self.logged: list[float] = []
        self.weights: dict[str, Tensor] = {}

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if "train_loss" in self.trainer.logged_metrics and len(self.logged) < self.trainer.global_step:
            self.logged.append(float(self.trainer.logged_metrics["train_loss"]))
            self.norms.append(float(self.trainer.strategy.model.get_global_grad_norm()))

    @override
    def on_train_end(self) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        self.weights = {name: safe_get_full_fp32_param(p).clone() for name, p in self.model.named_parameters()}


def reference(folder: str, steps: list[list[int]], clip: float | None) -> tuple[list[float], list[float], Any, Any]:
    """Losses, norms, weights at the end and changes of an ordinary loop that takes a step's sequences at once."""
    from transformers import AutoModelForCausalLM

    model, data = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(), Uneven()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for rows in steps:
        batch = {key: torch.stack([data[i][key] for i in rows]) for key in data[0]}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        wanted = batch["labels"][:, 1:].reshape(-1)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), wanted)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        losses.append(float(loss.detach()))
    after = {name: p.detach() for name, p in model.named_parameters()}
    return losses, norms, after, {name: (after[name] - before[name]).abs().max() for name in after}


def fit(folder: str, *, batch_size: int, accumulate: int, clip: float | None = None, **options: Any) -> Module:
    module, data = Module(folder), Uneven()
    sampler: Any = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    trainer = quiet_trainer(
        strategy=ZeROStrategy(precision="32-true", **options),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size, sampler=sampler))
    return module


def check(module: Module, expected: tuple[list[float], list[float], Any, Any], where: object) -> None:
    losses, norms, weights, changes = expected
    assert module.logged == pytest.approx(losses, rel=RELATIVE), where
    assert module.norms == pytest.approx(norms, rel=RELATIVE), where
    for name, weight in module.weights.items():
        error = (weight - weights[name]).abs().max()
        allowed = 2 * RELATIVE * changes[name] + ROUNDINGS * weight.abs().max()
        assert error <= allowed, (where, name, float(error), float(allowed))
        # Weights of 1, as those of norms, are known too coarsely to tell when clipping makes steps small.
        assert weight.dim() < 2 or allowed < 0.1 * changes[name], (where, name)


def check_splits(folder: str) -> None:
    world = dist.get_world_size()
    for clip, splits in SPLITS.items():
        expected = reference(folder, [list(range(16)), list(range(16, 32))], clip)
        for accumulate, options in splits:
            size = 16 // world // accumulate
            module = fit(folder, batch_size=size, accumulate=accumulate, clip=clip, **options)
            check(module, expected, (world, clip, options, accumulate))
    # 16 microbatches of two sequences in windows of 3: the last window of the epoch holds one.
    steps = [list(range(i, min(i + 6, 32))) for i in range(0, 32, 6)]
    expected = reference(folder, steps, None)
    for stage in (1, 2, 3):
        module = fit(folder, batch_size=2 // world, accumulate=3, stage=stage)
        check(module, expected, ("incomplete window", world, stage))


@ranks(1, deadline=180)
def splits_1(folder: str) -> None:
    check_splits(folder)


@ranks(2, deadline=240)
def splits_2(folder: str) -> None:
    check_splits(folder)
    check_bf16(folder)


@pytest.mark.slow
@pytest.mark.parametrize("body", [splits_1, splits_2], ids=["one rank", "two ranks"])
def test_every_split_makes_the_same_step(folder: str, body: Callable[[str], None]) -> None:
    body(folder)


def check_bf16(folder: str) -> None:
    # For stage 1 DeepSpeed has an optimizer of its own, without a loss scale. BF16 gradients: 8 bits.
    losses, norms, _, _ = reference(folder, [list(range(16)), list(range(16, 32))], None)
    for stage in (1, 2, 3):
        module, data = Module(folder), Uneven()
        sampler: Any = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
        trainer = quiet_trainer(
            strategy=ZeROStrategy(stage), max_epochs=1, accumulate_grad_batches=2, log_every_n_steps=1
        )
        trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler))
        assert module.logged == pytest.approx(losses, rel=2e-3), stage
        assert module.norms == pytest.approx(norms, rel=2**-7), stage
