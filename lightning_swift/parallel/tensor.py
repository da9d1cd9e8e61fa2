"""Tensor parallelism of Hugging Face causal LMs, by the plan that the model publishes or the user gives.

:func:`apply_tensor_parallel` cuts a model in place, whole or one pipeline stage of it, its weights still on the meta
device or real. Cut weights become ``DTensor`` s with their global shape, so ``fully_shard`` and checkpoints know them;
names do not change. Under sequence parallelism the activations between the blocks are cut along the sequence too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from lightning_swift.errors import ModelError
from lightning_swift.parallel._tensor_check import Layer, partial_in_layers
from lightning_swift.parallel._tensor_layers import (
    Layout,
    blocks_of,
    cut_embedding,
    cut_head,
    cut_layer,
    split_sequence,
)
from lightning_swift.parallel._tensor_limits import check_model
from lightning_swift.parallel.anatomy import Anatomy, probe
from lightning_swift.parallel.plans import Cut, Planned, inner_model, listed, read_plan

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
    inner = inner_model(model)
    needs_head = settings.sequence_parallel or settings.loss_parallel
    check_model(inner, size, settings.plan, probe(inner), needs_head=needs_head)


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
    inner = inner_model(model)
    anatomy = probe(inner)
    plan = read_plan(inner, settings.plan)
    layout = Layout(mesh, sequence=settings.sequence_parallel)
    layers = _owned_layers(inner, anatomy, plan)
    partial = _partial_names(inner, anatomy, layers, layout, self_check=settings.self_check)
    for layer in layers:
        cut_layer(layer.module, layer.entries, layout)
    if first and settings.sequence_parallel:
        split_sequence(layers[0].module, layout)
    _cut_ends(inner, plan, layout, settings)
    if settings.sequence_parallel:
        partial |= _partial_after(inner, anatomy)
    return _report(inner, partial)


def partial_parameters(model: nn.Module, report: TensorParallelReport) -> set[nn.Parameter]:
    """The parameter objects whose gradients are partial. Ask anew after loading, ``fully_shard`` or ``to_empty``."""
    parameters = dict(inner_model(model).named_parameters())
    return {parameters[name] for name in report.partial}


@torch.no_grad()
def sum_partial_gradients(
    pairs: Iterable[tuple[nn.Parameter, Tensor]], partial: set[nn.Parameter], group: ProcessGroup
) -> None:
    """Sum the gradients of the parameters in ``partial`` over ``group``, in place, with one all-reduce per dtype.

    Call it once per step, after all microbatches and before clipping. The pairs must come in the same order on all
    ranks, with ``DTensor`` gradients in the placements of their parameters.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter, gradient in pairs:
        if parameter in partial:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            by_dtype.setdefault(local.dtype, []).append(local)
    for locals_ in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in locals_])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(locals_, flat.split([gradient.numel() for gradient in locals_]), strict=True):
            gradient.copy_(part.view_as(gradient))


def tensor_parallel_context(settings: TensorParallelSettings) -> AbstractContextManager[None]:
    """What forward, loss and backward must run in: ``loss_parallel()`` if asked for, nothing otherwise."""
    return loss_parallel() if settings.loss_parallel else nullcontext()


def _owned_layers(model: Any, anatomy: Anatomy, plan: list[Planned]) -> list[Layer]:
    """The decoder layers that this rank's stage has; those of other stages are stubs without parameters."""
    found = []
    for number, module in enumerate(model.get_submodule(anatomy.layers)):
        name = f"{anatomy.layers}.{number}"
        entries = [
            Planned(entry.name.removeprefix(f"{name}."), entry.style, entry.by_user)
            for entry in plan
            if entry.name.startswith(f"{name}.")
        ]
        if next(module.parameters(), None) is not None:
            found.append(Layer(number, name, module, tuple(entries)))
    return found


def _partial_names(
    model: Any, anatomy: Anatomy, layers: list[Layer], layout: Layout, *, self_check: bool
) -> dict[str, bool]:
    if self_check:
        return partial_in_layers(model, anatomy, layers, layout)
    return {name: part for layer in layers for name, part in _by_rule(layer, layout).items()}


def _partial_after(model: Any, anatomy: Anatomy) -> dict[str, bool]:
    """Under sequence parallelism what runs after the layers and is not cut sees a part of the sequence only."""
    after = tuple(f"{name}." for name in anatomy.after)
    return {
        name: True
        for name, parameter in model.named_parameters()
        if name.startswith(after) and parameter.requires_grad and not isinstance(parameter, DTensor)
    }


def _by_rule(layer: Layer, layout: Layout) -> dict[str, bool]:
    """Without the self-check: named ones are partial, and under sequence parallelism all outside the blocks."""
    blocks = tuple(f"{name}." for name in blocks_of(layer.entries))
    cut = {entry.name: entry.meaning.cut is not Cut.SUM_GRADIENT for entry in layer.entries}
    partial: dict[str, bool] = {}
    unknown: list[str] = []
    for name, parameter in layer.module.named_parameters():
        planned = [other for other in cut if name == other or name.startswith(f"{other}.")]
        if not parameter.requires_grad or any(cut[other] for other in planned):
            continue
        if planned:
            partial[f"{layer.name}.{name}"] = True
        elif name.startswith(blocks):
            unknown.append(name)
        else:
            partial[f"{layer.name}.{name}"] = layout.sequence
    if unknown:
        raise ModelError(
            f"nothing says whether the gradients of {listed(unknown)} are partial.",
            where=layer.name,
            fix="Leave the self-check of tensor parallelism on, or name them in tp_plan.",
        )
    return partial


def _cut_ends(model: Any, plan: list[Planned], layout: Layout, settings: TensorParallelSettings) -> None:
    """Cut embedding and head, as far as this stage has them, and tie them again: cutting makes two weights of one."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = getattr(head, "weight", None) is not None and getattr(embedding, "weight", None) is head.weight
    for entry in plan:
        module = _module(model, entry.name)
        if module is head and isinstance(head, nn.Linear):
            cut_head(head, layout, loss_parallel=settings.loss_parallel)
        elif module is embedding and isinstance(embedding, nn.Embedding):
            cut_embedding(embedding, layout)
    if tied:
        head.weight = embedding.weight


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _report(model: Any, partial: Mapping[str, bool]) -> TensorParallelReport:
    def is_cut(parameter: nn.Parameter) -> bool:
        return isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)

    parameters = list(model.named_parameters())
    return TensorParallelReport(
        sharded=tuple(name for name, parameter in parameters if is_cut(parameter)),
        replicated=tuple(name for name, parameter in parameters if not is_cut(parameter)),
        partial=tuple(name for name, _ in parameters if partial.get(name, False)),
    )
