"""Adapters that the strategy puts in train as peft's own in a single process, and as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_swift.adapters.initial import initialise_adapters
from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.callbacks import ActivationCheckpointing
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.models.lazy import lazy_pretrained
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, save_tiny_model, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import BATCH, STEPS, fit, mean_losses, micro_batches, on_first_rank, single_process
from tests.parallel.test_parity import assert_gradients, close

SETTINGS = {
    "lora": LoraSettings(r=8),
    "rslora": LoraSettings(r=4, alpha=8, rslora=True),
    "dora": LoraSettings(r=4, alpha=8.5, dora=True, target_modules=["q_proj", "v_proj", "down_proj"]),
    "regular expression": LoraSettings(r=2, target_modules=r".*layers\.[01]\..*(up|gate)_proj"),
}
# A fifth of what the other tests use: scaled by 4, adapters move the model that much faster, and so does an error.
LR = 1e-3
# Options of peft's own, written down a second time.
PEFT: dict[str, dict[str, Any]] = {
    "lora": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_rslora": True},
    "dora": {"r": 4, "lora_alpha": 8.5, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
    "regular expression": {"r": 2, "lora_alpha": 32, "target_modules": r".*layers\.[01]\..*(up|gate)_proj"},
}


def peft_model(model: Any, name: str) -> Any:
    """What a user of peft writes, with the first values that a strategy draws."""
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **PEFT[name]))
    initialise_adapters(model)
    return wrapped


class ByHand(UserModule):
    """The user's own peft model."""

    def __init__(self, kind: str, settings: str, **config: Any) -> None:
        super().__init__(kind, **config)
        self.settings = settings

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = peft_model(self.model, self.settings).train()


def parity(kind: str, name: str, world: int) -> None:
    """Losses and every adapter's first gradient against a plain loop over a peft model."""
    # Twenty steps for plain adapters; how others differ from them is in the first gradients, and in the next steps.
    steps = STEPS if name == "lora" else 8
    strategy = FSDPBF16Strategy("32-true", lora=SETTINGS[name])
    module, recorded = fit(UserModule(kind, lr=LR, layers=2), strategy, steps=steps)
    losses, gradients, _ = single_process(
        peft_model(tiny_model(kind, layers=2).train(), name).train(), world=world, steps=steps, lr=LR
    )
    assert_gradients(recorded.gradients, gradients)
    assert all("lora_" in parameter for parameter in gradients)
    assert close(mean_losses(module), losses), name


@ranks(1)
def test_one_rank_is_peft_in_a_single_process() -> None:
    for name in SETTINGS:
        parity("llama", name, 1)


@pytest.mark.parametrize(("kind", "names"), [("llama", list(SETTINGS)), ("qwen3", ["lora", "dora"])])
@ranks(2)
def test_two_ranks_are_peft_in_a_single_process(kind: str, names: list[str]) -> None:
    for name in names:
        parity(kind, name, 2)


@ranks(2)
def test_fp32_is_ddp_over_a_peft_model_bit_for_bit() -> None:
    # With two ranks a sum over them has one order only: losses and all weights after them are equal.
    for name, kind in (("lora", "gemma"), ("dora", "llama"), ("rslora", "qwen3")):
        strategy = FSDPBF16Strategy("32-true", lora=SETTINGS[name])
        ours, recorded = fit(UserModule(kind, layers=2), strategy, steps=8)
        theirs, reference = fit(ByHand(kind, name, layers=2), "ddp", steps=8)
        assert ours.losses == theirs.losses, name
        assert recorded.weights.keys() == reference.weights.keys()
        for parameter, weight in reference.weights.items():
            assert torch.equal(recorded.weights[parameter], weight), f"{name}: {parameter}"
        assert any(weight.any() for parameter, weight in recorded.weights.items() if "lora_B" in parameter)


@on_first_rank
def bf16_emulator(name: str, *, world: int, steps: int) -> list[list[float]]:
    """By hand in one process: a frozen base and a copy of the adapters in bfloat16, masters of these in float32."""
    master = peft_model(tiny_model(layers=2).train(), name)
    work = peft_model(tiny_model(layers=2).train(), name)
    for parameter in work.parameters():
        parameter.data = parameter.data.bfloat16()
    pairs = [(p, c) for p, c in zip(master.parameters(), work.parameters(), strict=True) if p.requires_grad]
    optimizer = torch.optim.AdamW([p for p, _ in pairs], lr=5e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        for parameter, copy in pairs:
            copy.data.copy_(parameter.data)
            parameter.grad = torch.zeros_like(parameter)
        (parts,) = micro_batches(step, world=world)
        losses.append([])
        for x in parts:
            loss = work(input_ids=x, labels=x, use_cache=False).loss
            loss.backward()
            losses[-1].append(float(loss.detach()))
            for parameter, copy in pairs:
                assert parameter.grad is not None
                parameter.grad += copy.grad.float() / world
                copy.grad = None
        optimizer.step()
    return losses


@ranks(2)
def test_bf16_is_the_emulator_bit_for_bit() -> None:
    # Halving is exact in binary, so sums over two ranks do not depend on when they are divided.
    for name in ("lora", "rslora"):
        module, recorded = fit(UserModule(layers=2), FSDPBF16Strategy(lora=SETTINGS[name]), steps=6)
        expected = bf16_emulator(name, world=2, steps=6)
        assert module.losses == [losses[dist.get_rank()] for losses in expected], name
        frozen = {w.dtype for parameter, w in recorded.weights.items() if "lora_" not in parameter}
        adapters = {w.dtype for parameter, w in recorded.weights.items() if "lora_" in parameter}
        assert (frozen, adapters) == ({torch.bfloat16}, {torch.float32})


class Lazy(UserModule):
    """Builds its pretrained model without weights, and an optimizer over everything."""

    def __init__(self, folder: str, *, lazy: bool, every: bool = False) -> None:
        super().__init__(folder=folder)
        self.lazy, self.every = lazy, every

    def configure_model(self) -> None:
        if self.model is None and self.lazy:
            self.model = lazy_pretrained(self.folder).train()
        super().configure_model()

    def configure_optimizers(self) -> Any:
        if not self.every:
            return super().configure_optimizers()
        groups = [
            {"params": list(self.model.get_input_embeddings().parameters()), "lr": 1e-9},
            {"params": [p for n, p in self.named_parameters() if "embed_tokens" not in n]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.0, lambda step: 1.0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), layers=2))


@ranks(2)
def test_weights_read_late_and_optimizers_over_everything_change_nothing(folder: str) -> None:
    cases: list[dict[str, Any]] = [
        {"precision": "32-true", "lora": SETTINGS["dora"]},
        {"precision": "bf16-mixed", "lora": SETTINGS["dora"]},
        {"precision": "bf16-true", "lora": SETTINGS["lora"]},
    ]
    for options in cases:
        expected, reference = fit(Lazy(folder, lazy=False), FSDPBF16Strategy(**options), steps=3)
        ours, recorded = fit(Lazy(folder, lazy=True, every=True), FSDPBF16Strategy(**options), steps=3)
        assert ours.losses == expected.losses, options
        assert recorded.weights.keys() == reference.weights.keys()
        assert all(torch.equal(recorded.weights[n], w) for n, w in reference.weights.items())
        (optimizer,) = ours.trainer.optimizers
        (group,) = optimizer.param_groups
        assert all(p.requires_grad for p in group["params"])
        # The rate of the group that is left, not of the one that is gone.
        assert group["lr"] == ours.lr


class CausalLosses(CausalLM):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.logged_metrics["train_loss"]))


@ranks(2)
def test_causal_lm_takes_adapters_unchanged(folder: str) -> None:
    """Every Trainer entry point works on the wrapped model, with the token-exact loss."""
    module = CausalLosses(folder, lr=LR, weight_decay=0.01, max_new_tokens=2)
    trainer = quiet_trainer(
        strategy=FSDPBF16Strategy("32-true", lora=SETTINGS["lora"]), max_steps=6, max_epochs=-1, log_every_n_steps=1
    )
    data = loader(Tokens(), batch_size=BATCH, rank=dist.get_rank(), world_size=2)
    trainer.fit(module, data)
    losses, _, _ = single_process(peft_model(tiny_model(layers=2).train(), "lora").train(), world=2, steps=6, lr=LR)
    assert close(module.losses, losses)
    validation = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    assert trainer.test(module, data, verbose=False)[0]["test_loss"] == validation
    assert trainer.predict(module, loader(Tokens(2, length=4), batch_size=2))[0].shape == (2, 4 + 2)


@ranks(2)
def test_options_that_must_not_change_adapters_do_not() -> None:
    # DoRA looks at base weights outside the layers that own them, and needs all that plain adapters need.
    lora = SETTINGS["dora"]
    expected = fit(UserModule(), FSDPBF16Strategy("32-true", lora=lora), steps=3)[0].losses
    cases: list[tuple[dict[str, Any], list[Any]]] = [
        ({"cpu_offload": True, "data_parallel_replicate": 2}, []),
        ({"reshard_after_forward": False, "compile": "aot_eager"}, []),
        ({"block_classes": ["LlamaMLP", "LlamaAttention"]}, []),
        ({}, [ActivationCheckpointing("full")]),
    ]
    for options, callbacks in cases:
        strategy = FSDPBF16Strategy("32-true", lora=lora, **options)
        assert fit(UserModule(), strategy, steps=3, callbacks=callbacks)[0].losses == expected, options
