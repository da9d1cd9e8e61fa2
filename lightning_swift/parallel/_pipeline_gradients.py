"""Gradients of one schedule step: taken off the parameters, put in the parameters' layout, given back by ``backward``.

A schedule computes gradients in the forward call of the pipelined model. They wait beside the loss until its
``backward``, which scales them by what the user did to the loss and adds them to ``.grad``: accumulation, a loss
divided by a number and several forward passes in a step mean what they mean without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ModelError
from lightning_swift.parallel.anatomy import pretrained_inside
from lightning_swift.parallel.schedule import ScheduleSettings
from lightning_swift.parallel.stages import Stage

__all__ = ["Collected", "deposit", "sum_tied", "taken_gradients"]

Pairs = list[tuple[nn.Parameter, Tensor]]


class Collected:
    """Gradients of one schedule step, as pairs of parameter and gradient once the step has ended."""

    def __init__(self) -> None:
        self.pairs: Pairs = []


@contextmanager
def taken_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[Collected]:
    """Collect the gradients that are computed inside; what lay in ``.grad`` before lies there again afterwards."""
    collected = Collected()
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield collected
        collected.pairs = [(p, _in_layout_of(p, p.grad)) for p in parameters if p.grad is not None]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _in_layout_of(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    # Autograd leaves gradients of vocabulary-sharded embeddings replicated, for one. Norms of local parts, exchanges
    # between ranks and sums in place need one layout.
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def deposit(anchor: Tensor, loss: Tensor, pairs: Pairs, on_backward: Callable[[Tensor], None] | None = None) -> Tensor:
    """``loss`` as a differentiable scalar whose ``backward`` adds the gradients of ``pairs`` to ``.grad``.

    Args:
        anchor: Any tensor that requires a gradient; it gets none.
        loss: Scalar.
        pairs: Parameters and their gradients of ``loss``; the gradients are used up.
        on_backward: Called with what the gradients are multiplied with, before they are.
    """
    result: Tensor = _Deposit.apply(anchor, loss, pairs, on_backward)
    return result


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, loss: Tensor, pairs: Pairs, on_backward: Callable[[Tensor], None] | None
    ) -> Tensor:
        ctx.pairs, ctx.on_backward = pairs, on_backward
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        pairs, ctx.pairs = ctx.pairs, None
        if pairs is None:
            raise ModelError(
                "backward was called a second time on the loss of one forward pass.",
                where="pipelined model",
                fix="Call backward once, on the sum of what is to be minimised; retain_graph has no effect here.",
            )
        if ctx.on_backward is not None:
            ctx.on_backward(outputs[0])
        _give_back(pairs, outputs[0])
        return None, None, None, None


@torch.no_grad()
def _give_back(pairs: Pairs, factor: Tensor) -> None:
    for parameter, gradient in pairs:
        scaled = gradient.mul_(factor.to(gradient.dtype))
        parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)


@torch.no_grad()
def sum_tied(stages: Sequence[Stage], pairs: Pairs, settings: ScheduleSettings, group: dist.ProcessGroup) -> None:
    """Add the gradients of the two copies of each tied weight, on the first and on the last stage, in place."""
    pp = dist.get_world_size(group)
    ends = (settings.rank_of(0, pp), settings.rank_of(settings.n_stages(pp) - 1, pp))
    rank = dist.get_rank(group)
    if settings.n_stages(pp) == 1 or rank not in ends:
        return
    mine = [_tied_gradients(stage, pairs) for stage in stages if stage.first or stage.last]
    if ends[0] == ends[1]:
        for one, other in zip(*mine, strict=True):
            one.add_(other)
            other.copy_(one)
        return
    peer = ends[1] if rank == ends[0] else ends[0]
    for gradient in mine[0]:
        gradient.add_(_exchanged(gradient, peer, group))


def _tied_gradients(stage: Stage, pairs: Pairs) -> list[Tensor]:
    """Of the parameters that the first and the last stage both have, in an order that is the same on both."""
    found = {id(parameter): gradient for parameter, gradient in pairs}
    named = dict(pretrained_inside(stage.model).named_parameters(remove_duplicate=False))
    tied = [named[name] for name in stage.tied if name in named and named[name].requires_grad]
    for parameter in tied:
        if id(parameter) not in found:
            # Without a part in the loss on this end; the other end waits for an answer all the same.
            found[id(parameter)] = torch.zeros_like(parameter)
            pairs.append((parameter, found[id(parameter)]))
    return [_local(found[id(parameter)]) for parameter in tied]


def _exchanged(gradient: Tensor, peer: int, group: dist.ProcessGroup) -> Tensor:
    mine, theirs = gradient.contiguous(), torch.empty_like(gradient, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.isend, mine, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
