"""Exact token means: sums and counts of target tokens, gathered over microbatches and ranks.

The mean that a training step asks for is over all target tokens of the step. Neither the mean over ranks that DDP and
FSDP take, nor the mean over microbatches that accumulation takes, is that mean when the counts differ. So each
microbatch contributes the gradient of its *sum* of token losses, and the whole gradient is divided once, by the
number of tokens that all ranks and microbatches had together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_swift.errors import DataError

__all__ = ["IGNORED", "TokenMean", "Totals", "count_targets", "scale_gradients", "with_a_target"]

# The label that cross_entropy and transformers leave out.
IGNORED = -100


class Totals(NamedTuple):
    """What all ranks have together."""

    mean: float
    """Loss per target token; 0.0 without any."""
    tokens: int
    ranks: int


@dataclass
class TokenMean:
    """A running sum of token losses and number of tokens of this rank; both stay on the device until asked for."""

    loss: Tensor | float = 0.0
    tokens: Tensor | float = 0.0

    def add(self, mean: Tensor, tokens: Tensor) -> None:
        """Add ``tokens`` (scalar) losses whose mean is ``mean`` (scalar)."""
        # FP64 keeps counts exact beyond 2**24; MPS does not have it.
        kind = torch.float32 if mean.device.type == "mps" else torch.float64
        self.loss = self.loss + mean.detach().to(kind) * tokens
        self.tokens = self.tokens + tokens.to(kind)

    def totals(self, reduce_sum: Callable[[Tensor], Tensor], device: torch.device) -> Totals:
        """Sum over ranks, in one collective that every rank must join. Starts again from nothing."""
        kind = torch.float32 if device.type == "mps" else torch.float64
        mine = torch.stack([torch.as_tensor(v, dtype=kind, device=device) for v in (self.loss, self.tokens, 1.0)])
        loss, tokens, ranks = reduce_sum(mine).tolist()
        self.loss = self.tokens = 0.0
        return Totals(loss / tokens if tokens else 0.0, int(tokens), int(ranks))


def count_targets(labels: Tensor) -> Tensor:
    """Number of tokens that ``labels`` (``[batch, length]``) give a target for, as a scalar on their device.

    The first label of a sequence is no target: a causal model predicts each token from those before it.

    Raises:
        DataError: The sequences have one token, so that there is nothing to predict.
    """
    if labels.dim() != 2 or labels.shape[1] < 2:
        raise DataError(
            f"labels have shape {list(labels.shape)}, which leaves no token to predict.",
            where="batch['labels']",
            fix="Give labels of shape [batch, length] with a length of at least 2.",
        )
    return (labels[:, 1:] != IGNORED).sum()


def with_a_target(labels: Tensor, input_ids: Tensor, tokens: Tensor) -> Tensor:
    """The same labels, or with one target put in if they have none, so that their mean loss is a number.

    A mean over nothing is 0/0, and its gradient need not be zero. The caller gives the result weight 0. Without a look
    at the value of ``tokens`` on the host, which would stall the device.
    """
    first = torch.where(tokens > 0, labels[0, 1], input_ids[0, 1])
    labels = labels.clone()
    labels[0, 1] = first
    return labels


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients, sharded or not, in place."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    if local:
        torch._foreach_mul_(local, factor)
