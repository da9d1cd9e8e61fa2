"""The callback under real Trainers: single device, DDP, FSDP2 set up by the user, and this package's strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.callbacks import ActivationCheckpointing
from lightning_swift.errors import ConfigurationError
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer
from tests.harness.ranks import ranks

MODES: tuple[Any, ...] = ("full", "selective", "every_n")


class Counting(UserModule):
    """Counts how often a part of the first block starts, in training and in evaluation."""

    def configure_model(self) -> None:
        new = self.model is None
        super().configure_model()
        if new:
            self.starts = {True: 0, False: 0}
            self.model.model.layers[0].mlp.register_forward_pre_hook(self._count)

    def _count(self, module: Any, args: Any) -> None:
        self.starts[module.training] += 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss  # the cache is left at the model's default, which is on
        self.losses.append(float(loss.detach()))
        return loss


def fit(*callbacks: L.Callback, strategy: Any = "auto", module: UserModule | None = None, steps: int = 3) -> Any:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    module = module or Counting()
    trainer = quiet_trainer(
        strategy=strategy, max_steps=steps, callbacks=list(callbacks), num_sanity_val_steps=1, limit_val_batches=1
    )
    data = loader(Tokens(), batch_size=4, rank=rank, world_size=size)
    # trainer.fit(model, train, val): validation runs before training and must not be recomputed.
    trainer.fit(module, data, data)
    return module


def assert_same_run(a: Any, b: Any, mode: str) -> None:
    assert a.losses == b.losses, mode
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        p, q = (x.to_local() if hasattr(x, "to_local") else x for x in (p, q))
        assert torch.equal(p, q), (mode, name)
    assert b.starts[True] == 2 * a.starts[True], f"{mode}: each training forward was run once more"
    assert a.starts[False] == b.starts[False] > 0
    # Below the LightningModule, on which Lightning's DDP leaves a forward of its own.
    assert not any("forward" in module.__dict__ for module in b.model.modules()), "teardown took it off"


def test_single_device() -> None:
    plain = fit()
    for mode in MODES:
        assert_same_run(plain, fit(ActivationCheckpointing(mode)), mode)


@ranks(2)
def test_ddp() -> None:
    plain = fit(strategy="ddp")
    for mode in MODES:
        assert_same_run(plain, fit(ActivationCheckpointing(mode), strategy="ddp"), mode)


class ShardsItself(Counting):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        super().configure_model()
        if not hasattr(self.model, "set_requires_gradient_sync"):
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


@ranks(2)
def test_blocks_that_the_user_has_sharded() -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    def strategy() -> Any:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    plain = fit(strategy=strategy(), module=ShardsItself())
    for mode in MODES:
        assert_same_run(plain, fit(ActivationCheckpointing(mode), strategy=strategy(), module=ShardsItself()), mode)


@ranks(2)
def test_this_packages_strategy() -> None:
    from lightning_swift import FSDPBF16Strategy

    seen: list[Any] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.strategy.activation_checkpointing)

    plain = fit(strategy=FSDPBF16Strategy(precision="32-true"))
    for mode in MODES:
        callback = ActivationCheckpointing(mode)
        assert_same_run(plain, fit(callback, Watch(), strategy=FSDPBF16Strategy(precision="32-true")), mode)
        assert seen.pop() == callback.settings


def test_a_second_fit_is_checkpointed_again() -> None:
    callback, module = ActivationCheckpointing(), Counting()
    fit(callback, module=module)
    first = module.starts[True]
    fit(callback, module=module)
    assert module.starts[True] == 2 * first == 2 * 2 * 3


def test_validate_alone_is_left_alone() -> None:
    module = Counting()
    callback = ActivationCheckpointing(blocks=["NoSuchBlock"])
    quiet_trainer(callbacks=[callback], limit_val_batches=1).validate(
        module, loader(Tokens(), batch_size=4), verbose=False
    )
    assert module.starts[False] == 1


@ranks(1)
def test_validate_alone_is_left_alone_by_this_packages_strategy() -> None:
    from lightning_swift import FSDPBF16Strategy

    callback = ActivationCheckpointing(blocks=["NoSuchBlock"])
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), callbacks=[callback], limit_val_batches=1)
    trainer.validate(Counting(), loader(Tokens(), batch_size=4), verbose=False)
    assert trainer.strategy.activation_checkpointing is None


def test_an_exception_leaves_the_model_as_it_was() -> None:
    class Fails(Counting):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            assert any("forward" in module.__dict__ for module in self.modules())
            raise RuntimeError("on purpose")

    module = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(ActivationCheckpointing(), module=module)
    assert not any("forward" in m.__dict__ for m in module.modules())


def test_two_callbacks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than one ActivationCheckpointing"):
        fit(ActivationCheckpointing(), ActivationCheckpointing("selective"))


def test_own_checkpointing_of_the_module_is_refused() -> None:
    class Own(Counting):
        def configure_model(self) -> None:
            super().configure_model()
            self.model.activation_checkpointing_enable()

    with pytest.raises(ConfigurationError, match="Hugging Face's own gradient checkpointing"):
        fit(ActivationCheckpointing(), module=Own())


@pytest.mark.parametrize("wrong", [{"mode": "half"}, {"mode": "every_n", "every_n": 0}, {"blocks": "Block"}], ids=str)
def test_wrong_arguments_are_refused_at_construction(wrong: Any) -> None:
    with pytest.raises(ConfigurationError):
        ActivationCheckpointing(**wrong)


def test_it_can_be_written_in_yaml() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_subclass_arguments(L.Callback, "callback")
    config = parser.parse_string(
        "callback: {class_path: lightning_swift.callbacks.ActivationCheckpointing, "
        "init_args: {mode: every_n, every_n: 3, blocks: [LlamaDecoderLayer]}}"
    )
    callback = parser.instantiate(config).callback
    assert callback.settings.every_n == 3
    assert callback.settings.blocks == ("LlamaDecoderLayer",)
