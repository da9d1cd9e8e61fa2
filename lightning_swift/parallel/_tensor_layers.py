"""Cuts one decoder layer, the embedding and the head by the styles of a plan, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves, tree_map

from lightning_swift.adapters.tensor_parallel import RankedDropout, cut_lora, is_lora
from lightning_swift.errors import ModelError
from lightning_swift.parallel.experts import cut_experts, cut_parameter, local_parameters
from lightning_swift.parallel.plans import Cut, Planned, Style, base_layer

__all__ = ["Layout", "blocks_of", "cut_embedding", "cut_head", "cut_layer", "split_sequence"]


@dataclass(frozen=True)
class Layout:
    """Over which ranks a model is cut, and how activations lie between its blocks.

    Args:
        mesh: One-dimensional mesh of the tensor-parallel ranks.
        sequence: Whether activations between the blocks are cut along the sequence.
    """

    mesh: DeviceMesh
    sequence: bool = False

    @property
    def outside(self) -> Placement:
        """Placement of the activations between the blocks: the sequence is the last dimension but one."""
        return Shard(-2) if self.sequence else Replicate()


def cut_layer(layer: nn.Module, entries: Iterable[Planned], layout: Layout) -> None:
    """Cut the modules of one decoder layer; the names of ``entries`` are relative to it."""
    entries = list(entries)
    for entry in entries:
        _cut(layer, entry, layout)
    planned = {entry.name for entry in entries}
    for name in blocks_of(entries):
        block = layer.get_submodule(name)
        block.register_forward_pre_hook(_Gather(layout), with_kwargs=True)
        for inner, part in block.named_modules():
            if _is_bystander(f"{name}.{inner}", part, planned):
                part.forward = _WholeForward(part)
    if layout.sequence:
        _drop_apart(layer, tuple(f"{name}." for name in blocks_of(entries)), layout.mesh.get_local_rank())


def blocks_of(entries: Iterable[Planned]) -> list[str]:
    """Names of the blocks: the parents of the linear layers that are cut, such as attention and MLP."""
    parents = {entry.name.rpartition(".")[0]: None for entry in entries if entry.meaning.cut in (Cut.COLUMNS, Cut.ROWS)}
    return [name for name in parents if name]


def cut_embedding(embedding: nn.Module, layout: Layout) -> None:
    """Cut an embedding along its vocabulary; its output is whole."""
    _parallelize(embedding, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()), layout)
    embedding.register_forward_hook(_materialise)


def cut_head(head: nn.Module, layout: Layout, *, loss_parallel: bool) -> None:
    """Cut the output head along its vocabulary; its output is whole, or a ``DTensor`` for a cut loss."""
    style = ColwiseParallel(
        input_layouts=layout.outside,
        output_layouts=Shard(-1) if loss_parallel else Replicate(),
        use_local_output=not loss_parallel,
    )
    _parallelize(head, style, layout)


def split_sequence(layer: nn.Module, layout: Layout) -> None:
    """Have the first decoder layer take its rank's part of the sequence; the gradient is gathered."""
    layer.register_forward_pre_hook(_Split(layout.mesh), with_kwargs=True)


def _cut(layer: nn.Module, entry: Planned, layout: Layout) -> None:
    style = entry.meaning
    if style.cut is Cut.PARAMETER:
        owner_name, _, name = entry.name.rpartition(".")
        owner = layer.get_submodule(owner_name)
        cut_parameter(owner, name, layout.mesh)
        if not isinstance(owner.__dict__.get("forward"), _LocalForward):
            owner.forward = _LocalForward(owner)
        return
    if style.cut is Cut.SUM_GRADIENT:
        return
    module = layer.get_submodule(entry.name)
    if style.cut is Cut.EXPERTS:
        cut_experts(module, layout.mesh, sequence=layout.sequence)
    elif style.cut in (Cut.COLUMNS, Cut.ROWS):
        _parallelize(base_layer(module), _linear_style(style, layout), layout)
        if is_lora(module):
            cut_lora(module, style, layout.mesh, layout.outside)
    else:
        cut_embedding(module, layout)


def _linear_style(style: Style, layout: Layout) -> ParallelStyle:
    if style.cut is Cut.COLUMNS:
        # The block has gathered its input already, unless the linear layer lies directly on the decoder layer.
        return ColwiseParallel(input_layouts=layout.outside, output_layouts=Replicate() if style.whole else Shard(-1))
    return RowwiseParallel(input_layouts=Replicate() if style.whole else Shard(-1), output_layouts=layout.outside)


def _parallelize(module: nn.Module, style: ParallelStyle, layout: Layout) -> None:
    # Each rank cuts its own copy: the copies are equal, or empty.
    parallelize_module(module, layout.mesh, style, src_data_rank=None)


def _drop_apart(layer: nn.Module, blocks: tuple[str, ...], rank: int) -> None:
    """Between the blocks each rank has other positions, of which equal masks would drop the same elements."""
    for name, part in list(layer.named_modules()):
        if isinstance(part, nn.Dropout) and not name.startswith(blocks):
            owner, _, own = name.rpartition(".")
            setattr(layer.get_submodule(owner), own, RankedDropout(part.p, rank=rank).train(part.training))


def _is_bystander(name: str, module: nn.Module, planned: set[str]) -> bool:
    """Whether a module inside a block is a leaf with weights or random draws that the plan says nothing of."""
    if next(module.children(), None) is not None:
        return False
    if next(module.parameters(), None) is None and not isinstance(module, nn.modules.dropout._DropoutNd):
        return False
    return not any(f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.") for other in planned)


class _Gather:
    """Turns the input of a block into one replicated ``DTensor``.

    The layers that read it then share one reduction in the backward pass, and one gather under sequence parallelism.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _change_hidden(block, args, kwargs, self._gather)

    def _gather(self, hidden: Tensor) -> Tensor:
        spread = DTensor.from_local(hidden, self.layout.mesh, [self.layout.outside], run_check=False)
        return spread.redistribute(placements=[Replicate()])


class _Split:
    """Cuts the hidden states along the sequence."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _change_hidden(layer, args, kwargs, self._split)

    def _split(self, hidden: Tensor) -> Tensor:
        length, size = hidden.shape[-2], self.mesh.size()
        if length % size:
            raise ModelError(
                f"a sequence of length {length} cannot be cut over {size} ranks.",
                where="sequence parallelism",
                fix="Pad the batch to a multiple of tensor_parallel_size, or turn sequence_parallel off.",
            )
        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(-2)]).to_local()


def _change_hidden(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    for name in ("hidden_states", "x"):
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise ModelError("is called without hidden states.", where=type(module).__name__, fix="Use tensor_parallel_size=1.")


class _Shadow:
    """Shadows ``forward`` of a module. Refers to the module only, so it still copies and pickles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def original(self) -> Callable[..., Any]:
        # Looked up at each call: fully_shard replaces the class after this object was made.
        forward: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return forward


class _LocalForward(_Shadow):
    """Lets a module see its rank's part of the parameters that lie on it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with local_parameters(self.module):
            return self.original()(*args, **kwargs)


class _WholeForward(_Shadow):
    """Lets a module that the plan does not name compute on plain tensors where it is given a replicated ``DTensor``.

    What comes out is replicated again, so gradients inside are whole: the next column cut sums them. Random draws on a
    ``DTensor`` would make torch synchronise generators over all ranks in the middle of a step.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spread = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)), None)
        if spread is None:
            return self.original()(*args, **kwargs)
        args, kwargs = tree_map(_plain, (args, kwargs))
        mesh = spread.device_mesh

        def replicated(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

        return tree_map(replicated, self.original()(*args, **kwargs))


def _plain(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _materialise(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    # A compiled layer cannot differentiate through the collective that is still under way.
    return torch.clone(output)
