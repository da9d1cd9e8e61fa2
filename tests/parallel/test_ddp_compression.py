"""Gradient compression on gloo: what each hook computes, bit for bit where it has one answer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_swift.errors import ConfigurationError
from lightning_swift.strategies._compression import CompressionSettings
from lightning_swift.strategies.ddp import DDPBF16Strategy
from tests.harness.models import Tokens, UserModule, loader, quiet_trainer, tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import Recorder, fit, mean_losses, micro_batches
from tests.parallel.test_token_loss import Module as TokenModule
from tests.parallel.test_token_loss import Uneven
from tests.parallel.test_token_loss import config as token_config
from tests.parallel.test_token_loss import reference as token_reference


def local_gradients(world: int, step: int = 0) -> list[dict[str, Tensor]]:
    """Each rank's own gradient of a step of untrained weights, computed in one process."""
    found = []
    for x in micro_batches(step, world=world)[0]:
        model = tiny_model().train()
        model(input_ids=x, labels=x, use_cache=False).loss.backward()
        found.append({f"model.{name}": p.grad for name, p in model.named_parameters()})
    return found


@ranks(2)
def test_bf16_is_a_sum_in_bf16_on_the_cpu_too() -> None:
    _, recorded = fit(UserModule(), DDPBF16Strategy("32-true", compression="bf16"), steps=1)
    one, other = local_gradients(2)
    for name, gradient in recorded.gradients.items():
        # Halving is exact, so that the only roundings are those to bfloat16; with two ranks the sum has one order.
        assert torch.equal(gradient, (one[name].bfloat16() / 2 + other[name].bfloat16() / 2).float()), name


@ranks(2)
def test_fp16_rounds_eight_times_less_and_never_overflows() -> None:
    exact = fit(Scaled(1.0), DDPBF16Strategy("32-true"), steps=1)[1].gradients
    errors = {}
    for method in ("bf16", "fp16"):
        for factor in (1.0, 1e8, 1e-12):
            strategy = DDPBF16Strategy("32-true", compression=method)
            found = fit(Scaled(factor), strategy, steps=1)[1].gradients
            for name, gradient in found.items():
                assert gradient.isfinite().all()
                error = (gradient / factor - exact[name]).norm() / exact[name].norm()
                # Two roundings to nearest of 8 bits, or of 11.
                assert error <= (2**-8 if method == "bf16" else 2**-11), (method, factor, name)
                errors[method, factor] = max(errors.get((method, factor), 0.0), float(error))
    assert errors["fp16", 1e8] < errors["bf16", 1e8] / 4


class Scaled(UserModule):
    """Gradients ``factor`` times as large, as those of sums over many tokens are."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor


@ranks(2)
def test_a_gradient_that_is_no_number_is_none_on_every_rank() -> None:
    class Broken(UserModule):
        def on_after_backward(self) -> None:
            bad = [n for n, p in self.named_parameters() if not p.grad.isfinite().all()]
            self.bad = bad

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if dist.get_rank() == 1 else loss

    for method in ("bf16", "fp16"):
        module, _ = fit(Broken(), DDPBF16Strategy("32-true", compression=method), steps=1)
        assert len(module.bad) == len(list(module.parameters()))


@ranks(2)
def test_token_sums_stay_exact_under_compression() -> None:
    gradients, _ = token_reference("llama", [list(range(16))])
    for method, bound in (("bf16", 2**-8), ("fp16", 2**-11)):
        module = TokenModule(token_config())
        sampler: Any = torch.utils.data.DistributedSampler(Uneven(), 2, dist.get_rank(), shuffle=False)
        data = torch.utils.data.DataLoader(Uneven(), batch_size=4, sampler=sampler)
        strategy = DDPBF16Strategy("32-true", compression=method)
        quiet_trainer(strategy=strategy, max_steps=1, accumulate_grad_batches=2).fit(module, data)
        for name, expected in gradients[0].items():
            error = (module.gradients[0][name] - expected).norm() / expected.norm()
            assert error <= bound, (method, name)


class Still(UserModule):
    """A step that changes no weight, so that every gradient can be had again without compression."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Sums(L.Callback):
    """The sum of all gradients from a step on."""

    def __init__(self, start: int) -> None:
        self.start, self.total = start, {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step >= self.start:
            for name, p in pl_module.named_parameters():
                self.total[name] = self.total.get(name, 0) + p.grad.double()


def sums(strategy: Any, start: int) -> dict[str, Tensor]:
    recorder = Sums(start)
    trainer = quiet_trainer(strategy=strategy, max_steps=8, callbacks=[recorder])
    trainer.fit(Still(), loader(Tokens(), batch_size=4, rank=dist.get_rank(), world_size=2))
    return recorder.total


@ranks(2)
def test_powersgd_sends_later_what_it_leaves_out() -> None:
    start = 2
    exact = sums(DDPBF16Strategy("32-true"), start)
    strategy = DDPBF16Strategy("32-true", compression="powersgd", powersgd_rank=2, powersgd_start=start)
    sent = sums(strategy, start)
    state = strategy.powersgd_state
    assert state.iter >= start
    (owed,) = state.error_dict.values()
    owed = owed.double()
    dist.all_reduce(owed)
    left_out = (sum((exact[n] - sent[n]).square().sum() for n in exact)).sqrt()
    # What was sent in all and what is still owed are the whole gradient: float32 sums of eight steps.
    assert left_out.item() == pytest.approx((owed / 2).norm().item(), rel=1e-4)
    whole = sum(g.square().sum() for g in exact.values()).sqrt()
    assert 0.01 * whole < left_out < whole


@ranks(2)
def test_powersgd_trains_after_its_start() -> None:
    # Three epochs.
    exact = mean_losses(fit(UserModule(layers=2), DDPBF16Strategy(), steps=24)[0])
    strategy = DDPBF16Strategy(compression="powersgd", powersgd_rank=4, powersgd_start=5)
    module, recorded = fit(UserModule(layers=2), strategy, steps=24)
    found = mean_losses(module)
    assert found[:6] == exact[:6]
    assert found != exact
    # It learns at least half of what whole gradients teach.
    assert exact[0] - found[-1] > (exact[0] - exact[-1]) / 2
    for weight in recorded.weights.values():
        other = weight.clone()
        dist.broadcast(other, 0)
        assert torch.equal(weight, other)


@ranks(1)
def test_a_single_rank_rounds_nothing() -> None:
    expected = fit(UserModule(), DDPBF16Strategy("32-true"), steps=4)[0].losses
    for method in ("bf16", "fp16", "powersgd"):
        strategy = DDPBF16Strategy("32-true", compression=method, powersgd_start=2)
        assert fit(UserModule(), strategy, steps=4)[0].losses == expected


@ranks(4)
def test_compression_with_accumulation_clipping_and_frozen_parameters_on_four_ranks() -> None:
    def run(method: Any) -> tuple[Any, Recorder]:
        module = UserModule()
        module.configure_model()
        module.model.model.embed_tokens.requires_grad_(False)
        strategy = DDPBF16Strategy("32-true", compression=method, powersgd_start=2, static_graph=True)
        return fit(module, strategy, steps=6, batch=1, accumulate_grad_batches=2, gradient_clip_val=0.3)

    exact = mean_losses(run(None)[0])
    for method in ("bf16", "fp16", "powersgd"):
        found = mean_losses(run(method)[0])
        # The first steps send (nearly) whole gradients; later ones may differ as far as training is sensitive.
        assert found[:2] == pytest.approx(exact[:2], abs=1e-4), method
        assert found == pytest.approx(exact, abs=5e-2), method


def test_values_that_are_not_allowed() -> None:
    for options, text in (
        ({"compression": "fp8"}, "bf16, fp16, powersgd"),
        ({"compression": "powersgd", "powersgd_rank": 0}, "powersgd_rank=0"),
        ({"compression": "powersgd", "powersgd_start": 1}, "powersgd_start=1"),
        ({"precision": "bf16-true", "compression": "bf16"}, "16 bits"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            DDPBF16Strategy(**options)
    assert str(CompressionSettings("powersgd", rank=2, start=7)) == "PowerSGD of rank 2 from step 7"


def test_powersgd_is_refused_where_its_hook_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_swift.strategies import _compression

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        _compression.register_compression(nn.Linear(2, 2), CompressionSettings("powersgd"))  # type: ignore[arg-type]
