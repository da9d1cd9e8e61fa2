"""The loss of a pipelined model: what a user may do with it, and what is said when it cannot be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.errors import ModelError
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.parallel.pipeline import PipelinedModel
from tests.harness.models import tiny_config
from tests.harness.ranks import ranks
from tests.pipeline.references import (
    GRADIENT,
    LOSS,
    batch_of,
    check_gradients,
    check_step,
    distance,
    model_of,
    pipelined,
    single,
    token_mean,
)


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@ranks(2)
def test_what_the_user_does_to_the_loss_reaches_the_gradients() -> None:
    reference, batches = model_of(tie=True), [batch_of(8, 12, seed=seed) for seed in range(2)]
    for name in ("1F1B", "ZBVZeroBubble"):
        model = pipelined(model_of(tie=True), name, 4)
        # Two forward passes in one step, one loss scaled, the other squared, and another step's gradients before them.
        for whole in (model, reference):
            whole.zero_grad()
            (whole(**batches[0]).loss / 2).backward()
            one, two = whole(**batches[0]).loss, whole(**batches[1]).loss
            (3 * one + two**2).backward()
        check_gradients(model, _gradients(reference), what=name)


@ranks(2)
def test_a_step_leaves_gradients_alone_until_backward() -> None:
    model, batch = pipelined(model_of(), "1F1B", 4), batch_of()
    model(**batch).loss.backward()
    before = _gradients(model)
    out = model(**batch)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())
    out.loss.backward()
    # Twice the same gradient is twice the gradient, exactly.
    assert all(torch.equal(p.grad, 2 * before[name]) for name, p in model.named_parameters())


@ranks(2)
def test_backward_twice_is_an_error() -> None:
    model = pipelined(model_of(), "1F1B", 4)
    loss = model(**batch_of()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ModelError, match="second time"):
        loss.backward()


@ranks(2)
def test_the_mode_of_the_model_does_not_decide_whether_it_trains() -> None:
    # A model of from_pretrained is in evaluation mode, and Lightning leaves it there.
    reference, batch = model_of().eval(), batch_of()
    model = pipelined(model_of().eval(), "1F1B", 4)
    assert not model.training
    check_step(model, reference, batch)


@ranks(2)
def test_a_loss_of_the_user() -> None:
    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        )

    batch = batch_of(8)
    batch["labels"][2:4] = -100
    for name, loss_fn in (("1F1B", token_mean), ("DualPipeV", smoothed), ("GPipe", smoothed)):
        reference, model = model_of(), pipelined(model_of(), name, 4, loss_fn=loss_fn)
        check_step(model, reference, batch, what=name, loss_fn=loss_fn)
    out = model(**{**batch, "labels": torch.full_like(batch["labels"], -100)})
    out.loss.backward()
    assert float(out.loss.detach()) == 0.0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@ranks(2)
def test_logits_in_evaluation_on_request_and_never_in_training() -> None:
    reference, batch = model_of(), batch_of(7, 13)
    for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        model = pipelined(model_of(), name, 4, gather_logits=True)
        out = model(**batch)
        with pytest.raises(ModelError, match=r"out\.logits: the logits of a training step stay"):
            _ = out.logits
        with torch.no_grad():
            evaluated, expected = model(**batch), reference(**batch)
            alone = model(input_ids=batch["input_ids"])
        assert evaluated.logits.shape == (7, 13, 256)
        # Logits of an untrained model are below 1; float32 rounds them by 6e-8 in each of a few layers.
        assert float((evaluated.logits - expected.logits).abs().max()) < 2e-6
        assert alone.loss is None
        assert alone.logits.shape == (7, 13, 256)
        assert evaluated[0] is evaluated.loss
        assert evaluated["loss"] is evaluated.loss
    model = pipelined(model_of(), "1F1B", 4)
    with torch.no_grad(), pytest.raises(ModelError, match="gather_logits=True"):
        _ = model(**batch).logits


@ranks(2)
def test_evaluation_in_inference_mode_leaves_a_model_that_trains() -> None:
    reference, batch = model_of(), batch_of()
    model = pipelined(model_of(), "ZBVZeroBubble", 4)
    with torch.inference_mode():
        evaluated = model(**{name: value.clone() for name, value in batch.items()}).loss
    assert not evaluated.is_inference()
    check_step(model, reference, batch)


@ranks(2)
def test_generate_says_that_it_cannot() -> None:
    model = pipelined(model_of(), "1F1B", 4)
    with pytest.raises(ModelError, match="generate needs a cache on all stages"):
        model.generate(input_ids=torch.ones(1, 2, dtype=torch.long))


class _Trainer:
    """What ``CausalLM.backward`` asks a Trainer for."""

    accumulate_grad_batches = 1


def _module(model: Any) -> CausalLM:
    module = CausalLM(tiny_config())
    module.model = model
    module._trainer = _Trainer()  # type: ignore[assignment]
    return module


@ranks(2)
def test_causal_lm_works_on_top_unchanged() -> None:
    batch = batch_of(8)
    nothing = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    mine, theirs = _module(pipelined(model_of(), "1F1B", 4)), _module(model_of())
    assert isinstance(mine.model, PipelinedModel)
    for part in (batch, nothing):
        losses = []
        for module in (mine, theirs):
            loss = module.training_step(part, 0)
            module.backward(loss)
            losses.append(float(loss.detach()))
        assert abs(losses[0] - losses[1]) < LOSS
    check_gradients(mine.model, _gradients(theirs.model))
    with torch.no_grad():
        for module in (mine, theirs):
            module._evaluation = [type(module._step)()]
            module.validation_step(batch, 0)
    # Sums over about 90 tokens of losses of 6, each rounded to float32.
    assert abs(float(mine._evaluation[0].loss) - float(theirs._evaluation[0].loss)) < 1e-4
    dist.barrier()


@ranks(2)
def test_gradients_are_those_of_the_layout_and_fixes_run_once_per_step() -> None:
    model, calls = pipelined(model_of(), "1F1B", 4), []

    def double(pairs: list[tuple[Any, Tensor]]) -> None:
        calls.append(len(pairs))
        for _, gradient in pairs:
            gradient.mul_(2)

    model.gradient_fixes.append(double)
    _, gradients = single(model_of(), batch_of())
    model(**batch_of()).loss.backward()
    assert calls == [len(list(model.parameters()))]
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad / 2, gradients[name]) < GRADIENT
