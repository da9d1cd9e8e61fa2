"""Tensor parallelism of Hugging Face causal LMs, by the plan that the model publishes or the user gives.

:func:`apply_tensor_parallel` cuts a model in place, whole or one pipeline stage of it, its weights still on the meta
device or real. Cut weights become ``DTensor`` s with their global shape, so ``fully_shard`` and checkpoints know them;
names do not change. Under sequence parallelism the activations between the blocks are cut along the sequence too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "TensorParallelReport",
    "TensorParallelSettings",
    "apply_tensor_parallel",
    "check_tensor_parallel",
    "partial_parameters",
    "sum_partial_gradients",
    "tensor_parallel_context",
]


@dataclass(frozen=True)
class TensorParallelSettings:
    """How a model is cut.

    Args:
        sequence_parallel: Also cut the activations between the blocks, along the sequence. Its length must be
            divisible by the number of ranks (``PipelinedModel(length_multiple=...)`` pads).
        loss_parallel: Keep the logits cut along the vocabulary while the loss is computed. The loss and its backward
            pass must run inside :func:`tensor_parallel_context`.
        plan: Entries that add to the published plan or take the place of its entries: pattern of names to a key of
            ``plans.STYLES``.
        self_check: Compare one layer of each kind, cut and whole, on random values before the model is cut. It
            decides whose gradients are partial, and refuses a plan that computes something else.
    """

    sequence_parallel: bool = False
    loss_parallel: bool = False
    plan: Mapping[str, str] | None = None
    self_check: bool = True


@dataclass(frozen=True)
class TensorParallelReport:
    """What became of the parameters, by their names in the Hugging Face model.

    Args:
        sharded: Cut over the ranks.
        replicated: Whole on each rank.
        partial: Those of the replicated ones, or of replicated ``DTensor`` s, whose gradient on a rank is only a
            part: the sum over the ranks is the gradient. See :func:`sum_partial_gradients`.
    """

    sharded: tuple[str, ...]
    replicated: tuple[str, ...]
    partial: tuple[str, ...]


def check_tensor_parallel(model: nn.Module, size: int, settings: TensorParallelSettings) -> None:
    """Refuse what cannot be cut over ``size`` ranks. Call it on the whole model, before any communication.

    Raises:
        ModelError: The model publishes no plan and the user gives none; ``size`` does not divide the heads, key/value
            heads, experts, or the dimension of a layer that is to be cut; a layer is of a kind that cannot be cut.
        ConfigurationError: The user's plan has an unknown style or a pattern that matches nothing.
    """


def apply_tensor_parallel(
    model: nn.Module, mesh: DeviceMesh, settings: TensorParallelSettings, *, first: bool = True, last: bool = True
) -> TensorParallelReport:
    """Cut ``model`` over ``mesh`` in place; before activation checkpointing, compile and ``fully_shard``.

    Real weights must be equal on all ranks already. Weights on the meta device stay there; ``load_lazy_weights``
    fills the local slices. A tied head stays tied.

    Args:
        model: A Hugging Face causal LM, whole or split into a stage in place; peft's wrapper may be around it.
        mesh: One-dimensional mesh of the tensor-parallel ranks.
        settings: How it is cut.
        first: Whether the model owns the first decoder layer (before which the sequence is cut).
        last: Whether it owns the head.

    Raises:
        ModelError: As :func:`check_tensor_parallel`, or the self-check finds a layer that computes something else
            when it is cut, or a parameter whose gradient is neither whole nor partial.
    """
    raise NotImplementedError


def partial_parameters(model: nn.Module, report: TensorParallelReport) -> set[nn.Parameter]:
    """The parameter objects whose gradients are partial. Ask anew after loading, ``fully_shard`` or ``to_empty``."""
    raise NotImplementedError


def sum_partial_gradients(
    pairs: Iterable[tuple[nn.Parameter, Tensor]], partial: set[nn.Parameter], group: ProcessGroup
) -> None:
    """Sum the gradients of the parameters in ``partial`` over ``group``, in place, with one all-reduce per dtype.

    Call it once per step, after all microbatches and before clipping. The pairs must come in the same order on all
    ranks, with ``DTensor`` gradients in the placements of their parameters.
    """
    raise NotImplementedError


def tensor_parallel_context(settings: TensorParallelSettings) -> AbstractContextManager[None]:
    """What forward, loss and backward must run in: ``loss_parallel()`` if asked for, nothing otherwise."""
    return nullcontext()
