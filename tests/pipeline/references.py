"""What a pipeline is measured against: the whole model in one process, on batches whose rows differ in all they can."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_swift.parallel.anatomy import probe
from lightning_swift.parallel.pipeline import PipelinedModel
from lightning_swift.parallel.schedule import ScheduleName, ScheduleSettings
from lightning_swift.parallel.stages import Balance, LossFunction, balance, cut
from tests.harness.models import VOCAB, tiny_model

# The issue's own bounds for float32: absolute for the loss, relative to the largest element for each gradient.
LOSS = 1e-6
GRADIENT = 1e-5
# A gradient this small beside the model's largest is the rounding of one that is zero (float32: 6e-8 per operation).
ZERO = 1e-6

Batch = dict[str, Tensor]


def model_of(kind: str = "llama", *, layers: int = 4, **kwargs: Any) -> Any:
    """A tiny model in training mode whose norms and biases are not the ones and zeros they start as."""
    model = tiny_model(kind, layers=layers, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def shared_copy(model: nn.Module) -> Any:
    """Another model with the same parameter objects, as another rank would have one with equal values."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, memo)


def batch_of(rows: int = 8, length: int = 16, *, seed: int = 0, mask: bool = True) -> Batch:
    """Token ids, with padding on the right in some rows and unequal numbers of labels in all."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels, attention = ids.clone(), torch.ones_like(ids)
    for row in range(rows):
        padding = row % 3 if mask else 0
        attention[row, length - padding :] = 0
        labels[row, length - padding :] = -100
        labels[row, : (3 * row) % length] = -100
    return {"input_ids": ids, "labels": labels, **({"attention_mask": attention} if mask else {})}


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss as a user may write it, in the type of the logits: Hugging Face's own is always in float32."""
    targets = labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)


def single(
    model: nn.Module, batch: Batch, *, loss_fn: LossFunction | None = None, **kwargs: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole model, in this process; gradients are cleared before."""
    model.zero_grad()
    out = model(**batch, use_cache=False, **kwargs)
    loss: Tensor = out.loss if loss_fn is None else loss_fn(out.logits, batch["labels"])
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def pipelined(
    model: nn.Module,
    name: ScheduleName = "1F1B",
    microbatches: int = 4,
    *,
    group: Any = None,
    layers: Balance = "auto",
    virtual_stages: int | None = None,
    **kwargs: Any,
) -> PipelinedModel:
    """This rank's part of ``model``, which is used up."""
    group = dist.group.WORLD if group is None else group
    pp, rank = dist.get_world_size(group), dist.get_rank(group)
    settings = ScheduleSettings(name, microbatches, virtual_stages)
    anatomy = probe(model)
    bounds = balance(model, anatomy, settings.n_stages(pp), layers)
    stages = cut(model, anatomy, bounds, settings.stage_ids(rank, pp))
    return PipelinedModel(stages, group=group, schedule=settings, **kwargs)


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest element of the reference."""
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def check_gradients(
    model: PipelinedModel, expected: dict[str, Tensor], *, scale: float = 1.0, bound: float = GRADIENT, what: str = ""
) -> None:
    """Every gradient on every rank equals the reference, and together the ranks have all of them."""
    names, largest = set(), max(float(g.abs().max()) for g in expected.values())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names.add(name)
        assert parameter.grad is not None, f"{what} {name}: no gradient"
        if expected[name].abs().max() < ZERO * largest:
            # Zero but for rounding, as that of a bias of keys, which softmax does not see.
            assert full(parameter.grad).abs().max() < ZERO * largest * scale, f"{what} {name}: not zero"
            continue
        error = distance(full(parameter.grad) / scale, expected[name])
        assert error < bound, f"{what} {name}: {error:.1e}"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    assert set().union(*everywhere) >= set(expected), f"{what}: missing {set(expected) - set().union(*everywhere)}"


def check_step(
    model: PipelinedModel,
    reference: Any,
    batch: Batch,
    *,
    what: str = "",
    loss_fn: LossFunction | None = None,
    **kwargs: Any,
) -> None:
    """One training step and one evaluation equal those of the whole model."""
    loss, gradients = single(reference, batch, loss_fn=loss_fn, **kwargs)
    model.zero_grad()
    out = model(**batch, use_cache=False, **kwargs)
    assert abs(float(out.loss.detach() - loss)) < LOSS, f"{what} loss {float(out.loss.detach()) - float(loss):.1e}"
    out.loss.backward()
    check_gradients(model, gradients, what=what)
    with torch.no_grad():
        evaluated = model(**batch, **kwargs).loss
    assert abs(float(evaluated - loss)) < LOSS, f"{what} evaluated loss {float(evaluated) - float(loss):.1e}"
