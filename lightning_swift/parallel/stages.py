"""Cuts a Hugging Face model into pipeline stages, in place and without copies, and runs one of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel._pipeline_balance import Balance, balance, stage_shares
from lightning_swift.parallel._pipeline_batch import Microbatch
from lightning_swift.parallel._pipeline_stubs import EmbeddingStub, Entry, Exit, Stub
from lightning_swift.parallel.anatomy import Anatomy, chain_of, pretrained_inside

__all__ = ["Balance", "LossFunction", "Stage", "balance", "cut", "shallow_copy", "split", "stage_shares"]

LossFunction = Callable[[Tensor, Tensor], Tensor]


def cut(model: nn.Module, anatomy: Anatomy, bounds: Sequence[tuple[int, int]], stage_ids: Sequence[int]) -> list[Stage]:
    """Make the stages ``stage_ids`` of ``model``, which is used up: what no stage owns is dropped.

    Nothing is copied but the modules on the way to the layers, which are shells, and a tied embedding if the first and
    the last stage are both here. Parameter names inside a stage are those of ``model``.

    Args:
        model: A ``PreTrainedModel`` or a wrapper of one, real or on the meta device.
        anatomy: What :func:`~lightning_swift.parallel.anatomy.probe` says about it.
        bounds: First and last layer (exclusive) of every stage of the pipeline.
        stage_ids: Numbers of the stages of this rank.

    Raises:
        ConfigurationError: A number outside ``bounds``.
    """
    if any(not 0 <= number < len(bounds) for number in stage_ids):
        raise ConfigurationError(f"there are {len(bounds)} stages, and {list(stage_ids)} were asked for.")
    last = len(bounds) - 1
    tied = _tied_names(model, anatomy)
    views = [model, *(_shell(model, anatomy) for _ in stage_ids[1:])]
    for view, number in zip(views, stage_ids, strict=True):
        split(view, anatomy, bounds[number], first=number == 0, last=number == last)
        if number == last and 0 in stage_ids and last != 0:
            _own_embedding(view, anatomy)
    return [
        Stage(view, anatomy, bounds[number], first=number == 0, last=number == last, tied=tied)
        for view, number in zip(views, stage_ids, strict=True)
    ]


def split(model: nn.Module, anatomy: Anatomy, bounds: tuple[int, int], *, first: bool, last: bool) -> None:
    """Replace whatever one stage of ``model`` does not own by stubs, in place; names do not change.

    A tied embedding stays on the last stage too.

    Args:
        model: The model or a wrapper of it.
        anatomy: What :func:`~lightning_swift.parallel.anatomy.probe` says about it.
        bounds: First and last (exclusive) layer of the stage.
        first: Whether it is the first stage, which owns what runs before the layers.
        last: Whether it is the last stage, which owns what runs after the layers.
    """
    pretrained = pretrained_inside(model)
    kept = _shared(pretrained, anatomy) if last else set()
    if not first:
        for name in anatomy.before - kept:
            _replace(pretrained, name)
    if not last:
        for name in anatomy.after:
            _replace(pretrained, name)
    layers = pretrained.get_submodule(anatomy.layers)
    for number, layer in enumerate(layers):
        if not bounds[0] <= number < bounds[1]:
            kind = Entry if number == bounds[0] - 1 else Exit if number == bounds[1] else Stub
            layers[number] = kind(layer, as_tuple=anatomy.returns_tuple)


class Stage(nn.Module):
    """One pipeline stage: the model with stubs for what other stages own.

    Args:
        model: The split model, or a wrapper of it.
        anatomy: What the model is made of.
        bounds: First and last (exclusive) layer.
        first: Whether it is the first stage.
        last: Whether it is the last stage.
        tied: Names of the parameters that the first and the last stage share.

    Attributes:
        model: The split model, or its wrapper.
        activation_dtype: Type of what is sent to the next stage; None sends it as it is.
        sequence_shards: Into how many parts sequence parallelism cuts what is received; set it before use.
        loss_fn: The user's loss, a mean over target tokens, from logits and labels; None takes the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        bounds: tuple[int, int],
        *,
        first: bool,
        last: bool,
        tied: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.anatomy, self.bounds, self.first, self.last, self.tied = anatomy, bounds, first, last, tied
        self.activation_dtype: torch.dtype | None = None
        self.sequence_shards = 1
        self.loss_fn: LossFunction | None = None

    @property
    def pretrained(self) -> Any:
        """The Hugging Face model, also where ``model`` wraps it."""
        return pretrained_inside(self.model)

    @property
    def layers(self) -> list[nn.Module]:
        """The layers that this stage owns."""
        return list(self.pretrained.get_submodule(self.anatomy.layers))[self.bounds[0] : self.bounds[1]]

    @property
    def hidden_size(self) -> int:
        """Size of the hidden states that are sent."""
        return self.anatomy.hidden_size

    @override
    def forward(self, inputs: Tensor, **microbatch: Any) -> Any:
        """Run the stage on one microbatch.

        Args:
            inputs: Token ids ``[rows, length]`` for the first stage, hidden states ``[rows, length, size]`` for others.
            microbatch: As :meth:`~lightning_swift.parallel._pipeline_batch.PipelineBatch.keywords` has it.

        Returns:
            Hidden states; on the last stage the loss of shape ``[1]``, or the pair of it and the logits if the
            microbatch asks for logits.
        """
        batch = Microbatch.of(microbatch)
        pretrained = self.pretrained
        arguments = {**batch.arguments, **self._input(pretrained, inputs), "use_cache": False}
        if self.last:
            return self._finish(pretrained, batch, arguments)
        backbone = chain_of(pretrained, self.anatomy.layers)[1][1]
        backbone(**arguments)
        return self._sent(pretrained)

    def _input(self, pretrained: Any, inputs: Tensor) -> dict[str, Tensor]:
        if self.first:
            return {"input_ids": inputs}
        pretrained.get_submodule(self.anatomy.layers)[self.bounds[0] - 1].received = inputs
        rows, length, size = inputs.shape
        placeholder = torch.zeros((), dtype=inputs.dtype, device=inputs.device)
        return {"inputs_embeds": placeholder.expand(rows, length * self.sequence_shards, size)}

    def _sent(self, pretrained: Any) -> Tensor:
        out: Tensor = pretrained.get_submodule(self.anatomy.layers)[self.bounds[1]].take()
        if self.activation_dtype is not None:
            out = out.to(self.activation_dtype)
        # The zero-bubble schedules detach it in place, which torch does not allow on a view.
        return out.clone() if out._is_view() else out

    def _finish(self, pretrained: Any, batch: Microbatch, arguments: dict[str, Any]) -> Any:
        if batch.labels is None:
            return None, pretrained(**arguments).logits
        if self.loss_fn is not None:
            logits = pretrained(**arguments).logits
            loss = _loss_of(self.loss_fn, logits, batch.labels_with_target()) * batch.share()
        else:
            out = pretrained(**arguments, labels=batch.labels, num_items_in_batch=batch.tokens)
            loss, logits = out.loss, out.logits
        # No view, of which fully_shard warns.
        loss = _whole(loss).float().reshape(1).clone()
        return (loss, logits) if batch.wants_logits else loss


def _loss_of(loss_fn: LossFunction, logits: Tensor, labels: Tensor) -> Tensor:
    try:
        return loss_fn(logits, labels)
    except (RuntimeError, NotImplementedError) as error:
        if not isinstance(logits, DTensor):
            raise
        raise ModelError(
            f"loss_fn cannot compute with logits that are cut along the vocabulary ({str(error).splitlines()[0]}).",
            where="loss_parallel",
            fix="Leave loss_parallel out, or compute with torch.nn.functional.cross_entropy, for which it is made.",
        ) from error


def _whole(loss: Tensor) -> Tensor:
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _replace(model: nn.Module, name: str) -> None:
    outer, _, own = name.rpartition(".")
    module = model.get_submodule(name)
    # peft keeps the layer that it adapts under this name.
    embedding = getattr(module, "base_layer", module)
    stub = EmbeddingStub(embedding.embedding_dim) if isinstance(embedding, nn.Embedding) else Stub(module)
    setattr(model.get_submodule(outer), own, stub)


def _tied_names(model: nn.Module, anatomy: Anatomy) -> tuple[str, ...]:
    """Names of parameters of the first stage that the last stage has too."""
    pretrained = pretrained_inside(model)
    after = {id(p) for name in anatomy.after for p in pretrained.get_submodule(name).parameters()}
    before = [
        (f"{name}.{key}", parameter)
        for name in sorted(anatomy.before)
        for key, parameter in pretrained.get_submodule(name).named_parameters()
    ]
    return tuple(name for name, parameter in before if id(parameter) in after)


def _shared(model: nn.Module, anatomy: Anatomy) -> set[str]:
    """Names of the modules before the layers that share a parameter with one after them."""
    after = {id(p) for name in anatomy.after for p in model.get_submodule(name).parameters()}
    return {name for name in anatomy.before if any(id(p) in after for p in model.get_submodule(name).parameters())}


def _shell(model: nn.Module, anatomy: Anatomy) -> nn.Module:
    """``model`` with modules of its own on the way to the layers, and all other modules shared."""
    layers = pretrained_inside(model).get_submodule(anatomy.layers)
    path = next(name for name, module in model.named_modules() if module is layers)
    chain = [shallow_copy(module) for _, module in chain_of(model, path)]
    for outer, inner, own in zip(chain, chain[1:], path.split("."), strict=False):
        outer._modules[own] = inner
    return chain[0]


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same children and parameters, whose own may be replaced without changing ``module``."""
    clone = copy.copy(module)
    for name, value in vars(nn.Module()).items():
        # What torch keeps in dictionaries (children, parameters, hooks) would otherwise be shared with the original.
        if isinstance(value, dict):
            clone.__dict__[name] = copy.copy(module.__dict__[name])
    return clone


def _own_embedding(model: nn.Module, anatomy: Anatomy) -> None:
    """Give the last stage its own copy of a tied embedding, since the first stage beside it uses the original."""
    pretrained = pretrained_inside(model)
    for name in _shared(pretrained, anatomy):
        outer, _, own = name.rpartition(".")
        original = pretrained.get_submodule(name)
        mine = copy.deepcopy(original)
        setattr(pretrained.get_submodule(outer), own, mine)
        copies = dict(zip(map(id, original.parameters()), mine.parameters(), strict=True))
        for after in anatomy.after:
            for part in pretrained.get_submodule(after).modules():
                for key, parameter in part._parameters.items():
                    if id(parameter) in copies:
                        part._parameters[key] = copies[id(parameter)]
