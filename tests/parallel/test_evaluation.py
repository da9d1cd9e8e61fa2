"""Evaluation leaves the model as training needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_swift.parallel.blocks import find_blocks
from lightning_swift.parallel.dtypes import PrecisionPolicy
from lightning_swift.parallel.mesh import MeshSizes, build_mesh
from lightning_swift.parallel.sharding import ShardingSettings, reshard, shard
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from tests.harness.ranks import ranks
from tests.parallel.references import fit


def sharded() -> UserModule:
    module = UserModule()
    module.configure_model()
    mesh = build_mesh(MeshSizes(dp_shard=dist.get_world_size()), "cpu")
    shard(module, mesh, ShardingSettings(PrecisionPolicy()), find_blocks(module))
    return module


def step(module: UserModule) -> Tensor:
    x = Tokens().x[:2]
    loss = module.model(input_ids=x, labels=x, use_cache=False).loss
    if torch.is_grad_enabled():
        loss.backward()
    return loss


@ranks(2)
def test_inference_mode_first_is_the_fault_that_no_grad_avoids() -> None:
    # On NCCL Lightning would evaluate under inference_mode (bug B5). Should torch cure it, the first half fails.
    module = sharded()
    with torch.inference_mode():
        step(module)
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        step(module)
    module = sharded()
    with torch.no_grad():
        step(module)
    step(module)
    assert all(p.grad is not None for p in module.parameters())


@ranks(1)
def test_every_loop_of_the_trainer_is_told_to_use_no_grad() -> None:
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), max_steps=1, inference_mode=True)
    trainer.fit(UserModule(), loader(Tokens(), batch_size=4))
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert [loop.inference_mode for loop in loops] == [False] * 4


@ranks(2)
def test_after_an_evaluation_only_shards_are_left() -> None:
    module = sharded()
    shards = {name: id(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        step(module)
    # The outermost group stays gathered after a forward pass, for the backward pass that does not come.
    assert {name: id(p) for name, p in module.named_parameters()} != shards
    reshard(module)
    assert {name: id(p) for name, p in module.named_parameters()} == shards


class Evaluates(UserModule):
    """Checks in each hook after an evaluation that the optimizer's parameters are those of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = 0

    def on_validation_batch_end(self, *args: Any) -> None:
        assert all(isinstance(p, DTensor) for p in self.parameters())
        assert not torch.is_inference_mode_enabled()
        if self.trainer.optimizers:
            held = {id(p) for group in self.optimizers().param_groups for p in group["params"]}
            assert held == {id(p) for p in self.parameters()}
        self.checks += 1

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits.argmax(-1)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def data(n: int = 16) -> Any:
    return loader(Tokens(n), batch_size=4, rank=dist.get_rank(), world_size=dist.get_world_size())


@ranks(2)
def test_validation_before_within_and_after_training_changes_nothing() -> None:
    expected = fit(UserModule(), FSDPBF16Strategy("32-true"), steps=6)[0].losses
    module = Evaluates()
    strategy = FSDPBF16Strategy("32-true")
    trainer = quiet_trainer(strategy=strategy, max_steps=6, num_sanity_val_steps=2, val_check_interval=2)
    before = trainer.validate(module, data(), verbose=False)
    trainer.fit(module, data(64), data())
    assert module.losses == expected
    after = trainer.validate(module, data(), verbose=False)
    tested = trainer.test(module, data(), verbose=False)
    assert before[0]["val_loss"] > after[0]["val_loss"] == tested[0]["val_loss"]
    predicted = trainer.predict(module, data(8))
    assert len(predicted) == 1
    assert predicted[0].shape == (4, 32)
    assert module.checks >= 2 + 2 + 6 + 2 + 2 + 1
    # And training goes on from there.
    trainer.fit_loop.epoch_loop.max_steps = 8
    trainer.fit(module, data(64), data())
    assert len(module.losses) == 8
    assert module.losses[-1] < expected[0]


@ranks(2)
def test_a_second_trainer_takes_the_sharded_module_over() -> None:
    module, _ = fit(Evaluates(), FSDPBF16Strategy(), steps=2)
    other = quiet_trainer(strategy=FSDPBF16Strategy())
    assert other.validate(module, data(), verbose=False)[0]["val_loss"] > 0


@ranks(2)
def test_generation_between_training_steps() -> None:
    module, _ = fit(Generates(), FSDPBF16Strategy(), steps=3)
    assert module.generated == [(1, 8)] * 3


class Generates(UserModule):
    """Writes a sample after each step, which a forward pass without gradients leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.generated: list[tuple[int, ...]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.model.eval()
        with torch.no_grad():
            ids = self.model.generate(Tokens().x[:1, :4], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        self.model.train()
        self.generated.append(tuple(ids.shape))
