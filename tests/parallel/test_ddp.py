"""DDPBF16Strategy computes what plain DDP and a single process compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_swift.callbacks import ActivationCheckpointing
from lightning_swift.strategies.ddp import DDPBF16Strategy
from tests.harness.models import UserModule, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import (
    Frozen,
    Lora,
    PlainModule,
    Recorder,
    TiedByHand,
    ValueHead,
    fit,
    mean_losses,
    norm_of,
    single_process,
)
from tests.parallel.test_parity import assert_gradients, close

MODULES: dict[str, Any] = {
    "llama": lambda: UserModule("llama", layers=2),
    "qwen3 (tied)": lambda: UserModule("qwen3", layers=2),
    "gpt2": lambda: UserModule("gpt2", layers=2),
    "frozen": lambda: Frozen("llama", layers=2),
    "plain": PlainModule,
    "tied by hand": TiedByHand,
    "parameter on the module": lambda: ValueHead("llama", direct=True, layers=2),
    "adapters of peft": Lora,
}


def assert_same(ours: tuple[Any, Recorder], theirs: tuple[Any, Recorder], what: Any) -> None:
    assert ours[0].losses == theirs[0].losses, what
    assert ours[1].weights.keys() == theirs[1].weights.keys()
    for name, weight in theirs[1].weights.items():
        assert torch.equal(ours[1].weights[name], weight), (what, name)


@ranks(2)
def test_fp32_is_plain_ddp_bit_for_bit() -> None:
    for name, module in MODULES.items():
        assert_same(fit(module(), DDPBF16Strategy("32-true"), steps=8), fit(module(), "ddp", steps=8), name)


@ranks(2)
def test_bf16_is_plain_ddp_under_autocast_bit_for_bit() -> None:
    for name in ("llama", "gpt2", "plain"):
        ours = fit(MODULES[name](), DDPBF16Strategy(), steps=8)
        assert_same(ours, fit(MODULES[name](), "ddp", steps=8, precision="bf16-mixed"), name)


@ranks(2)
def test_options_that_must_not_change_anything_do_not() -> None:
    for accumulate in (1, 2):
        kwargs: dict[str, Any] = {"steps": 4, "batch": 2, "accumulate_grad_batches": accumulate}
        expected = fit(UserModule(layers=2), DDPBF16Strategy("32-true"), **kwargs)
        for options in (
            {"bucket_cap_mb": 0.01},
            {"gradient_as_bucket_view": False},
            {"find_unused_parameters": True},
            # Buckets of less than 1 MiB make torch's own splitting of compiled graphs fail.
            {"compile": "aot_eager", "bucket_cap_mb": 0.05},
            {"compile": "aot_eager", "block_classes": ["LlamaMLP"]},
        ):
            found = fit(UserModule(layers=2), DDPBF16Strategy("32-true", **options), **kwargs)
            assert_same(found, expected, (accumulate, options))


@ranks(2)
def test_a_static_graph_accumulates() -> None:
    for accumulate in (1, 2):
        kwargs: dict[str, Any] = {"steps": 6, "batch": 2, "accumulate_grad_batches": accumulate}
        expected = fit(UserModule(layers=2), DDPBF16Strategy("32-true"), **kwargs)
        for options in ({}, {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.1}):
            found = fit(UserModule(layers=2), DDPBF16Strategy("32-true", static_graph=True, **options), **kwargs)
            # The first micro-batch of all is reduced by itself, so that its sum is formed in another order.
            assert_gradients(found[1].gradients, expected[1].gradients, prefix="")
            assert close(found[0].losses, expected[0].losses)
            assert accumulate > 1 or found[0].losses == expected[0].losses


@ranks(2)
def test_checkpointing_and_compile_under_ddp() -> None:
    ways: list[tuple[Any, Any]] = [
        ("full", None),
        ("selective", "aot_eager"),
        ("full", "aot_eager"),
        ("selective", None),
    ]
    # Autocast is what BF16 adds: once recomputed eagerly, once in compiled blocks.
    for precision, cases in (("32-true", ways), ("bf16-mixed", ways[:2])):
        plain = fit(UserModule(layers=2), DDPBF16Strategy(precision), steps=3)
        for mode, backend in cases:
            recorder = Recorder()
            module = fit_with(ActivationCheckpointing(mode), recorder, DDPBF16Strategy(precision, compile=backend))
            # Compiled or not, the operations are the same ones in the same order.
            assert module.losses == plain[0].losses, (precision, mode, backend)


def fit_with(callback: Any, recorder: Recorder, strategy: Any) -> UserModule:
    from tests.harness.models import Tokens, loader, quiet_trainer

    module = UserModule(layers=2)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, callbacks=[callback, recorder])
    trainer.fit(module, loader(Tokens(), batch_size=4, rank=dist.get_rank(), world_size=dist.get_world_size()))
    return module


@ranks(1)
def single(accumulate: int) -> None:
    check_single_process(accumulate, 8)


@ranks(2)
def two(accumulate: int) -> None:
    check_single_process(accumulate, 4)


@ranks(4)
def four(accumulate: int) -> None:
    check_single_process(accumulate, 2)


def check_single_process(accumulate: int, batch: int) -> None:
    world = dist.get_world_size()
    steps = 20 // accumulate
    losses, gradients, _ = single_process(
        tiny_model(layers=2).train(), world=world, steps=steps, accumulate=accumulate, batch=batch
    )
    # Of one micro-batch both make the same.
    for without_sync in (True, False) if accumulate > 1 else (True,):
        strategy = DDPBF16Strategy("32-true", accumulate_without_sync=without_sync)
        module, recorded = fit(
            UserModule(layers=2), strategy, steps=steps, batch=batch, accumulate_grad_batches=accumulate
        )
        assert_gradients(recorded.gradients, gradients)
        assert close(mean_losses(module), losses), without_sync


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("run", [single, two, four], ids=["1", "2", "4"])
def test_fp32_is_a_single_process(run: Any, accumulate: int) -> None:
    run(accumulate)


class CountsReductions(UserModule):
    """Whether the gradients are the same on both ranks after each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.equal: list[bool] = []

    def on_after_backward(self) -> None:
        mine = torch.stack([p.grad.double().sum() for p in self.parameters() if p.grad is not None])
        other = mine.clone()
        dist.broadcast(other, 0)
        self.equal.append(bool(torch.equal(mine, other)))


@ranks(2)
def test_without_sync_gradients_are_exchanged_with_the_last_micro_batch_only() -> None:
    for without_sync, expected in ((True, [False] * 3 + [True]), (False, [True] * 4)):
        module = CountsReductions()
        fit(module, DDPBF16Strategy(accumulate_without_sync=without_sync), steps=1, accumulate_grad_batches=4)
        if dist.get_rank() == 1:
            assert module.equal == expected


class NormLogger(UserModule):
    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(self.trainer.strategy.gradient_norm()))


@ranks(2)
def test_clipping_is_a_single_process_and_plain_ddp() -> None:
    # Norms are about 1 here, so 0.3 clips every step, and 0.002 about a tenth of all elements.
    steps = 8
    losses, first, norms = single_process(tiny_model(layers=2).train(), world=2, steps=steps, clip_norm=0.3)
    module, _ = fit(NormLogger(layers=2), DDPBF16Strategy("32-true"), steps=steps, gradient_clip_val=0.3)
    assert close(mean_losses(module), losses)
    assert module.norms[0] == pytest.approx(norm_of(first), rel=2e-6)  # a sum of 2e5 squares in another order
    assert module.norms == pytest.approx(norms, rel=1e-3)  # their models have drifted by AFTER_TRAINING
    kwargs: dict[str, Any] = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    losses, _, _ = single_process(tiny_model(layers=2).train(), world=2, steps=steps, clip_value=0.002)
    module, _ = fit(UserModule(layers=2), DDPBF16Strategy("32-true"), steps=steps, **kwargs)
    assert close(mean_losses(module), losses)
    ours = fit(UserModule(layers=2), DDPBF16Strategy(), steps=4, **kwargs)
    assert_same(ours, fit(UserModule(layers=2), "ddp", steps=4, precision="bf16-mixed", **kwargs), "value")


@ranks(2)
def test_bf16_gradients_are_those_of_fp32_but_for_rounding() -> None:
    exact = fit(UserModule(), DDPBF16Strategy("32-true"), steps=1)
    for precision in ("bf16-mixed", "bf16-true"):
        module, recorded = fit(UserModule(), DDPBF16Strategy(precision))
        # Every product on the way through three blocks and back rounds to 2**-9: about 30 in a row, in both
        # directions at random, are sqrt(30) of that, 1e-2.
        gaps = {
            name: (recorded.gradients[name].float() - g).norm() / g.norm() for name, g in exact[1].gradients.items()
        }
        print(precision, max(gaps.values()))
        assert max(gaps.values()) <= 2e-2, precision
        assert max(gaps.values()) > 0
        assert mean_losses(module)[-1] < mean_losses(module)[0] - 0.1


class Observed(UserModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        out = self.model(**batch, use_cache=False)
        self.seen["logits"] = {out.logits.dtype}
        return out.loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["weights"] = {p.dtype for p in self.parameters()}
        self.seen["gradients"] = {p.grad.dtype for p in self.parameters()}

    def on_train_end(self) -> None:
        states = self.optimizers().state.values()
        self.seen["moments"] = {s[k].dtype for s in states for k in ("exp_avg", "exp_avg_sq")}
        self.seen["buffers"] = {b.dtype for b in self.buffers()}


@ranks(2)
def test_each_precision_keeps_what_it_promises() -> None:
    for precision, compute, master in (
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("32-true", torch.float32, torch.float32),
    ):
        module = Observed()
        module.configure_model()
        # Weights loaded in half precision must not make half-precision masters.
        module.model.to(torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
        for name, buffer in module.model.named_buffers():
            buffer.data = buffer.data.float() if "inv_freq" in name else buffer.data
        fit(module, DDPBF16Strategy(precision), steps=2)
        assert module.seen["logits"] == {compute}
        assert module.seen["weights"] == module.seen["gradients"] == module.seen["moments"] == {master}
        assert module.seen["buffers"] == {torch.float32}


@ranks(2)
def test_inputs_that_are_numbers_are_cast_for_bf16_true() -> None:
    import lightning as L

    from tests.harness.models import quiet_trainer

    class Regression(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
            self.seen: set[torch.dtype] = set()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.layers(batch[0])
            self.seen |= {batch[0].dtype, out.dtype}
            return out.float().square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 4)), batch_size=2)
    for precision, expected in (
        ("bf16-true", {torch.bfloat16}),
        ("bf16-mixed", {torch.float32, torch.bfloat16}),
        ("32-true", {torch.float32}),
    ):
        module = Regression()
        quiet_trainer(strategy=DDPBF16Strategy(precision), max_steps=1).fit(module, data)
        assert module.seen == expected


@ranks(2)
def test_ranks_that_start_from_different_values_train_one_model() -> None:
    class Different(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(10 + dist.get_rank())
            nn.init.normal_(self.head.weight)

    _, recorded = fit(Different(), DDPBF16Strategy(), steps=2)
    for weight in recorded.weights.values():
        other = weight.clone()
        dist.broadcast(other, 0)
        assert torch.equal(weight, other)
