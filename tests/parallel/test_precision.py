"""BF16 compute from FP32 masters: bit for bit what the policy says, and never silently something else."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn

import lightning_swift  # noqa: F401  # registers the name
from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.dtypes import PrecisionPolicy, cast_parameters, check_masters
from lightning_swift.strategies._precision import MeshPrecision
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import UserModule, quiet_trainer, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import bf16_emulator, fit


@pytest.mark.parametrize("kinds", [["llama", "qwen3"], ["mistral", "gemma", "gpt2"]], ids="-".join)
@ranks(2)
def test_bf16_is_the_emulator_bit_for_bit_at_two_ranks(kinds: list[str]) -> None:
    # Most CPUs emulate BF16, so only the first has the whole length.
    for kind, steps in zip(kinds, (20, 6, 6), strict=False):
        module, _ = fit(UserModule(kind, layers=2), FSDPBF16Strategy(), steps=steps)
        expected = bf16_emulator(kind, world=2, steps=steps, layers=2)
        assert module.losses == [losses[dist.get_rank()] for losses in expected], kind


@ranks(2)
def test_bf16_accumulation_sums_in_float32() -> None:
    for without_sync in (False, True):
        strategy = FSDPBF16Strategy(accumulate_without_sync=without_sync)
        module, _ = fit(UserModule(layers=2), strategy, steps=3, accumulate_grad_batches=4)
        expected = bf16_emulator("llama", world=2, steps=3, accumulate=4, synchronised=not without_sync, layers=2)
        assert module.losses == [losses[dist.get_rank()] for losses in expected], without_sync


@ranks(1)
def test_one_rank_is_the_emulator_too() -> None:
    module, _ = fit(UserModule(layers=2), FSDPBF16Strategy(), steps=8)
    assert module.losses == [losses[0] for losses in bf16_emulator("llama", world=1, steps=8, layers=2)]


class Observed(UserModule):
    """Notes the dtypes that matter while it trains."""

    def __init__(self, kind: str = "llama", *, half: bool = False) -> None:
        super().__init__(kind)
        self.half_weights = half
        self.seen: dict[str, set[torch.dtype]] = {}

    def configure_model(self) -> None:
        built = self.model is not None
        super().configure_model()
        if not built and self.half_weights:
            self.model.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.model(**batch, use_cache=False)
        self.note("logits", out.logits)
        self.note("ids", batch["input_ids"])
        return out.loss

    def note(self, what: str, *tensors: torch.Tensor) -> None:
        self.seen.setdefault(what, set()).update(t.dtype for t in tensors)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("weights", *self.parameters())
        self.note("gradients", *(p.grad for p in self.parameters() if p.grad is not None))

    def on_train_end(self) -> None:
        states = self.optimizers().state.values()
        self.note("moments", *(s[k] for s in states for k in ("exp_avg", "exp_avg_sq")))
        self.note("buffers", *self.buffers())


@ranks(2)
def test_each_precision_keeps_what_it_promises() -> None:
    fp32, bf16 = {torch.float32}, {torch.bfloat16}
    for precision, compute, master in (
        ("bf16-mixed", bf16, fp32),
        ("bf16-true", bf16, bf16),
        ("32-true", fp32, fp32),
    ):
        # Weights loaded in half precision must not make half-precision masters.
        module, _ = fit(Observed(half=precision == "bf16-mixed"), FSDPBF16Strategy(precision), steps=2)
        assert module.seen["logits"] == compute
        assert module.seen["weights"] == module.seen["moments"] == module.seen["gradients"] == master
        assert module.seen["ids"] == {torch.int64}
    module, _ = fit(Observed(), FSDPBF16Strategy("bf16-true"), steps=1)
    assert module.seen["buffers"] == fp32


@ranks(2)
def test_a_frozen_base_keeps_its_dtype_and_what_trains_is_float32() -> None:
    module = UserModule()
    module.configure_model()
    module.model.to(torch.bfloat16).requires_grad_(False)
    module.model.model.layers[1].mlp.requires_grad_(True)
    fit(module, FSDPBF16Strategy(), steps=2)
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}


@ranks(2)
def test_reduction_in_bfloat16_is_coarser_and_asked_for() -> None:
    exact = fit(UserModule(), FSDPBF16Strategy(), steps=3)[1].gradients
    coarse = fit(UserModule(), FSDPBF16Strategy(reduce_dtype="bfloat16"), steps=3)[1].gradients
    rounded = {name: torch.equal(g, g.bfloat16().float()) for name, g in coarse.items()}
    assert all(rounded.values())
    assert not all(torch.equal(g, g.bfloat16().float()) for g in exact.values())


@ranks(1)
def test_floating_point_inputs_are_cast_at_the_model_and_batches_are_not() -> None:
    class Regression(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            # Makes the module itself a group, whose inputs are the batch.
            self.offset = nn.Parameter(torch.zeros(1))
            self.seen: list[torch.dtype] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            out = self.model(x)
            self.seen += [x.dtype, y.dtype, out.dtype]
            return nn.functional.mse_loss(out.float() + self.offset, y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Regression()
    data = torch.utils.data.TensorDataset(torch.randn(4, 4), torch.randn(4, 1))
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), max_steps=1)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    assert module.seen == [torch.float32, torch.float32, torch.bfloat16]


@ranks(2)
def test_one_line_at_the_start_says_what_is_done() -> None:
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("lightning.pytorch").addHandler(Listener())
    fit(UserModule(), FSDPBF16Strategy(), steps=1)
    said = [line for line in lines if line.startswith("FSDPBF16Strategy: bf16-mixed")]
    expected = (
        "FSDPBF16Strategy: bf16-mixed (compute bfloat16, master weights and moments float32, gradients reduced in "
        "float32), mesh dp_shard 2"
    )
    assert said == ([expected] if dist.get_rank() == 0 else [])


@pytest.mark.parametrize(
    ("own", "asked"),
    [("bf16-mixed", "bf16-true"), ("bf16-mixed", "16-true"), ("32-true", "bf16-mixed"), ("bf16-true", "bf16-mixed")],
)
def test_a_trainer_that_asks_for_another_precision_is_refused(own: Any, asked: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(strategy=FSDPBF16Strategy(own), devices=1, precision=asked)
    assert f'"{asked}"' in str(caught.value)
    assert f'"{own}"' in str(caught.value)


@pytest.mark.parametrize("own", ["bf16-mixed", "bf16-true", "32-true"])
@pytest.mark.parametrize("same", [True, False])
def test_the_same_precision_or_none_is_no_contradiction(own: Any, same: bool) -> None:
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(own), devices=1, precision=own if same else None)
    assert trainer.precision == own
    assert type(trainer.precision_plugin) is MeshPrecision


@pytest.mark.parametrize(
    ("asked", "used"), [(None, "bf16-mixed"), ("bf16-mixed", "bf16-mixed"), ("bf16-true", "bf16-true")]
)
def test_a_registered_name_means_bf16(asked: Any, used: str) -> None:
    # Lightning overwrites the plugin of a strategy that it builds from a name (bug B8).
    trainer = quiet_trainer(strategy="swift_fsdp_bf16", devices=1, precision=asked)
    assert trainer.precision == used
    assert type(trainer.strategy.precision_plugin) is MeshPrecision


def test_a_registered_name_refuses_what_is_not_bf16() -> None:
    with pytest.raises(ConfigurationError, match="16-true"):
        quiet_trainer(strategy="swift_fsdp_bf16", devices=1, precision="16-true")


def test_a_reused_strategy_still_refuses() -> None:
    strategy = FSDPBF16Strategy()
    quiet_trainer(strategy=strategy, devices=1)
    # What a second Trainer does; on a CPU Lightning itself accepts no strategy twice.
    with pytest.raises(ConfigurationError, match="bf16-true"):
        strategy.precision_plugin = HalfPrecision("bf16-true")


@pytest.mark.parametrize("plugin", [DoublePrecision(), type("Mine", (Precision,), {})()])
def test_a_precision_plugin_of_the_users_own_is_refused_and_not_dropped(plugin: Precision) -> None:
    with pytest.raises(ConfigurationError, match=type(plugin).__name__):
        quiet_trainer(strategy=FSDPBF16Strategy(), devices=1, plugins=[plugin])


def test_an_agreeing_plugin_is_taken() -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    trainer = quiet_trainer(strategy=FSDPBF16Strategy(), devices=1, plugins=[plugin])
    assert type(trainer.precision_plugin) is MeshPrecision


def test_masters_that_were_cast_behind_the_strategys_back_are_refused() -> None:
    model = tiny_model()
    policy = PrecisionPolicy("bf16-mixed")
    assert cast_parameters(model, policy) == 0
    check_masters(model, policy)
    model.lm_head.to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        check_masters(model, policy)
    assert cast_parameters(model, policy) == 1
    check_masters(model, policy)
