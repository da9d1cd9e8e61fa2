"""The gradient of a step is that of the mean over all its target tokens, for every split into ranks and microbatches.

The reference is one process that takes all sequences of a step at once and divides their summed loss by their tokens.
Sequences have from 0 to 11 targets, so that neither a mean over ranks nor one over microbatches is right.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import VOCAB, quiet_trainer, tiny_config
from tests.harness.ranks import ranks

# Targets of each sequence. Every split of them gives microbatches and ranks with different counts; sequences 8 and 9
# have none, so that a microbatch of one rank, or of all, has nothing to learn from.
TARGETS = [6, 1, 11, 3, 2, 5, 7, 4, 0, 0, 9, 1, 1, 8, 10, 2, 3, 11, 1, 1, 6, 5, 2, 7, 1, 11, 4, 4, 9, 1, 3, 2]
LENGTH = 12
# FP32 sums in another order: relative to the largest gradient of a parameter.
RELATIVE = 1e-5
CLIP = 0.05


class Uneven(Dataset[dict[str, Tensor]]):
    def __init__(self, targets: list[int] = TARGETS) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(3, VOCAB, (len(targets), LENGTH), generator=generator)
        self.labels = self.ids.clone()
        for row, count in enumerate(targets):
            self.labels[row, : LENGTH - count] = -100

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones_like(self.ids[i]), "labels": self.labels[i]}


class Module(CausalLM):
    """With plain SGD, which does not amplify rounding in later steps, and a record of what it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradients: list[dict[str, Tensor]] = []
        self.logged: list[float] = []

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @override
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.gradients.append(gradients_of(self.model))

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if "train_loss" in self.trainer.logged_metrics and len(self.logged) < self.trainer.global_step:
            self.logged.append(float(self.trainer.logged_metrics["train_loss"]))


def gradients_of(model: Any) -> dict[str, Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def config(kind: str = "llama") -> Any:
    return tiny_config(kind, hidden=32, layers=2)


def reference(
    kind: str, steps: list[list[int]], clip: float | None = None
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Gradients and losses of an ordinary loop in one process."""
    module = CausalLM(config(kind))
    module.configure_model()
    model, data = module.model, Uneven()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients, losses = [], []
    for rows in steps:
        batch = {key: torch.stack([data[i][key] for i in rows]) for key in data[0]}
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        wanted = batch["labels"][:, 1:]
        total = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), wanted.reshape(-1), reduction="sum")
        loss = total / (wanted != -100).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        gradients.append(gradients_of(model))
        losses.append(float(loss))
        optimizer.step()
    return gradients, losses


def strategy(name: str) -> Any:
    if name == "fsdp":
        return FSDPBF16Strategy("32-true")
    if name == "swift_ddp":
        return DDPBF16Strategy("32-true")
    if name == "fsdp without sync":
        return FSDPBF16Strategy("32-true", accumulate_without_sync=True)
    return "ddp" if dist.get_world_size() > 1 else "auto"


def fit(
    kind: str, name: str, *, batch_size: int, accumulate: int, clip: float | None = None, **settings: Any
) -> Module:
    module = Module(config(kind), **settings)
    data = Uneven()
    sampler: Any = DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    trainer = quiet_trainer(
        strategy=strategy(name),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        log_every_n_steps=1,
    )
    trainer.fit(module, DataLoader(data, batch_size=batch_size, sampler=sampler))
    return module


def check(module: Module, gradients: list[dict[str, Tensor]], losses: list[float]) -> None:
    assert len(module.gradients) == len(gradients)
    for step, (ours, theirs) in enumerate(zip(module.gradients, gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        for key in ours:
            error = (ours[key] - theirs[key]).abs().max() / theirs[key].abs().max()
            assert error <= RELATIVE, (step, key, float(error))
        norms = [torch.nn.utils.get_total_norm(list(g.values())) for g in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1].item(), rel=RELATIVE)
    assert module.logged == pytest.approx(losses, rel=RELATIVE)


def check_splits(name: str, kind: str, accumulations: list[int], clip: float | None = None) -> None:
    world = dist.get_world_size()
    # 16 sequences a step, whatever the split, and two steps.
    gradients, losses = reference(kind, [list(range(16)), list(range(16, 32))], clip)
    for accumulate in accumulations:
        module = fit(kind, name, batch_size=16 // world // accumulate, accumulate=accumulate, clip=clip)
        check(module, gradients, losses)


@ranks(1)
def splits_1(*args: Any) -> None:
    check_splits(*args)


@ranks(2)
def splits_2(*args: Any) -> None:
    check_splits(*args)


@ranks(4)
def splits_4(*args: Any) -> None:
    check_splits(*args)


SPLITS = {1: splits_1, 2: splits_2, 4: splits_4}


@pytest.mark.parametrize("world", SPLITS)
@pytest.mark.parametrize("name", ["fsdp", "ddp", "swift_ddp"])
def test_every_split_has_the_same_gradient(world: int, name: str) -> None:
    SPLITS[world](name, "llama", [1, 2, 4])


def test_every_split_without_sync_has_the_same_gradient() -> None:
    splits_2("fsdp without sync", "llama", [4])


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma", "gpt2"])
@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_every_architecture_has_the_same_gradient(kind: str, name: str) -> None:
    splits_2(name, kind, [2])


@pytest.mark.parametrize("name", ["fsdp", "ddp", "swift_ddp"])
def test_clipping_sees_the_mean_over_tokens(name: str) -> None:
    splits_2(name, "llama", [1, 4], CLIP)


@ranks(2)
def incomplete_window(name: str) -> None:
    # 16 microbatches of one sequence on each rank in windows of 3: the last window holds one.
    steps = [list(range(i, min(i + 6, 32))) for i in range(0, 32, 6)]
    assert len(steps[-1]) == 2
    check(fit("llama", name, batch_size=1, accumulate=3), *reference("llama", steps))


@pytest.mark.parametrize("name", ["fsdp", "fsdp without sync", "ddp", "swift_ddp"])
def test_the_last_incomplete_window_is_exact(name: str) -> None:
    incomplete_window(name)


@ranks(2)
def empty_step(name: str) -> None:
    # Sequences 8 and 9 are a step of their own, on one rank each.
    steps = [[i, i + 1] for i in range(0, 32, 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit("llama", name, batch_size=1, accumulate=1)
    said = [w for w in caught if "no rank had a token to predict" in str(w.message)]
    assert len(said) == (1 if dist.get_rank() == 0 else 0)
    gradients, losses = reference("llama", steps)
    assert all(not g.any() for g in module.gradients[4].values())
    assert module.logged[4] == 0.0
    for record in (gradients, losses, module.gradients, module.logged):
        del record[4]  # type: ignore[attr-defined]
    check(module, gradients, losses)


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_a_step_without_any_target_changes_nothing(name: str) -> None:
    empty_step(name)


@ranks(2)
def mean_of_means(name: str) -> None:
    module = fit("llama", name, batch_size=2, accumulate=1, loss_reduction="mean")
    exact, _ = reference("llama", [[0, 1, 2, 3]])
    key = "lm_head.weight"
    assert (module.gradients[0][key] - exact[0][key]).abs().max() / exact[0][key].abs().max() > 1e-2
    assert all(torch.isfinite(g).all() for step in module.gradients for g in step.values())


def test_the_mean_of_means_is_something_else() -> None:
    mean_of_means("ddp")


class Before(L.Callback):
    """What any callback sees before clipping and the step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append(gradients_of(pl_module.model))


@ranks(2)
def callbacks_see_the_mean() -> None:
    before, module = Before(), Module(config())
    data = Uneven()
    sampler: Any = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
    trainer = quiet_trainer(strategy="ddp", max_steps=1, accumulate_grad_batches=2, callbacks=[before])
    trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler))
    (seen,), (expected, _) = before.gradients, reference("llama", [list(range(16))])
    for key, value in seen.items():
        assert torch.equal(value, module.gradients[0][key])
        assert (value - expected[0][key]).abs().max() <= RELATIVE * expected[0][key].abs().max()


def test_callbacks_see_the_gradient_of_the_mean() -> None:
    callbacks_see_the_mean()


@ranks(2)
def validation(name: str) -> None:
    module = Module(config())
    data = Uneven()
    sampler: Any = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
    loaders = [DataLoader(data, batch_size=size, sampler=sampler) for size in (1, 5)]
    trainer = quiet_trainer(strategy=strategy(name))
    single = trainer.validate(module, loaders[1], verbose=False)[0]
    both = trainer.validate(module, loaders, verbose=False)
    tested = trainer.test(module, loaders[0], verbose=False)[0]
    _, losses = reference("llama", [list(range(32))])
    assert single["val_loss"] == pytest.approx(losses[0], rel=RELATIVE)
    assert single["val_perplexity"] == pytest.approx(torch.tensor(losses[0]).exp().item(), rel=1e-4)
    assert both[0]["val_loss_0"] == pytest.approx(losses[0], rel=RELATIVE)
    assert both[0]["val_loss_1"] == pytest.approx(losses[0], rel=RELATIVE)
    assert tested["test_loss"] == pytest.approx(losses[0], rel=RELATIVE)


@pytest.mark.parametrize("name", ["fsdp", "ddp"])
def test_validation_is_over_all_tokens(name: str) -> None:
    validation(name)
