"""The loss of a pipelined model: what a user may do with it, and what is said when it cannot be done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_swift.errors import ModelError
from tests.harness.ranks import ranks
from tests.pipeline.references import (
    GRADIENT,
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

    # A stage between two of another rank takes all before it sends: NCCL has one queue for both ways.
    interleaved = pipelined(model_of(), "Interleaved1F1B", 2)
    assert _messages(interleaved, batch) == ("ssrrss", "rrssrr")[dist.get_rank()]


def _messages(model: Any, batch: Any) -> str:
    """What this rank does in an evaluation, in order: s for each activation sent, r for each received."""
    order: list[str] = []

    def noting(letter: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(letter)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(dist, "isend", noting("s", dist.isend))
        patch.setattr(dist, "recv", noting("r", dist.recv))
        model(**batch)
    return "".join(order)


@ranks(2)
def test_generate_continues_as_the_whole_model_does() -> None:
    ids = batch_of(3, 6)["input_ids"]
    mask = torch.ones_like(ids)
    # Prompts of unequal length are padded on the left.
    ids[1, :2], mask[1, :2] = 0, 0
    settings = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5}
    for kind, name in (("llama", "1F1B"), ("gpt2", "ZBVZeroBubble"), ("gemma3", "Interleaved1F1B")):
        # Weights large enough that no two tokens are about equally likely.
        reference, mine = model_of(kind), model_of(kind)
        for model in (reference, mine):
            _sharpen(model)
        expected = reference.eval().generate(**settings, do_sample=False)
        model = pipelined(mine, name, 2)
        assert torch.equal(model.generate(**settings, do_sample=False, synced_gpus=True), expected)
        # Ranks with different random states draw the same tokens, and other ones the next time.
        torch.manual_seed(dist.get_rank())
        drawn = [model.generate(**settings, do_sample=True, temperature=5.0) for _ in range(2)]
        everywhere: list[Any] = [None, None]
        dist.all_gather_object(everywhere, drawn[0].tolist())
        assert everywhere[0] == everywhere[1]
        assert drawn[0].tolist() != drawn[1].tolist()


@torch.no_grad()
def _sharpen(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(3)


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
