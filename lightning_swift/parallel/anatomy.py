"""What a Hugging Face causal language model is made of: its layers, and what runs before and after them.

Found by one forward pass of a copy on the meta device with hooks on its parts, for any architecture, without a table
of models. The order in which modules are declared is no guide: OPT declares its last norm before its layers. What the
pass cannot place, or what a split would compute wrongly, is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_swift.errors import ModelError

__all__ = ["Anatomy", "chain_of", "hidden_size", "pretrained_inside", "probe"]

_LENGTH = 4


@dataclass(frozen=True)
class Anatomy:
    """Parts of a model; all names are relative to the ``PreTrainedModel``.

    Attributes:
        layers: Name of the list of decoder layers.
        n_layers: Their number.
        before: Modules beside the layers, with parameters, that run before the first layer.
        after: Modules beside the layers, with parameters, that run after the last layer.
        returns_tuple: Whether a layer returns a tuple whose first entry is the hidden states.
        hidden_size: Size of the hidden states.
        counts_tokens: Whether the model's loss is a sum over tokens divided by ``num_items_in_batch`` and nothing else.
    """

    layers: str
    n_layers: int
    before: frozenset[str]
    after: frozenset[str]
    returns_tuple: bool
    hidden_size: int
    counts_tokens: bool


def pretrained_inside(module: nn.Module) -> Any:
    """The one ``PreTrainedModel`` that ``module`` is or wraps (as peft does).

    Raises:
        ModelError: There is none.
    """
    from transformers import PreTrainedModel

    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise ModelError(
        f"{type(module).__name__} is no Hugging Face model and wraps none.",
        where="pipeline stages",
        fix="Use a causal language model of transformers, or pipeline_parallel_size=1.",
    )


def hidden_size(model: Any) -> int:
    """Size of the hidden states of a Hugging Face model, under whatever name its configuration has it."""
    return int(model.config.get_text_config().hidden_size)


def chain_of(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules on the way from ``model`` to the one called ``name``, both included, outermost first, with names."""
    chain = [("", model)]
    for part in name.split(".") if name else []:
        outer_name, outer = chain[-1]
        chain.append((f"{outer_name}.{part}" if outer_name else part, getattr(outer, part)))
    return chain


_known: dict[tuple[type, str], Anatomy] = {}


def probe(model: nn.Module) -> Anatomy:
    """Find the parts of ``model``, a causal language model of transformers or a wrapper of one.

    Computes nothing with the model's own weights, which may be on any device or empty. The result is kept per class
    and configuration.

    Raises:
        ModelError: The architecture cannot be split: no list of layers, layers that depend on one another by other
            ways than the hidden states, parts that run between layers, or parts that the model has and a model of
            its configuration has not.
    """
    pretrained = pretrained_inside(model)
    key = (type(pretrained), pretrained.config.to_json_string(use_diff=False))
    if key not in _known:
        _known[key] = _examine(pretrained)
    _refuse_additions(pretrained, _known[key])
    _refuse_sharing(pretrained, _known[key])
    return _known[key]


def _examine(model: Any) -> Anatomy:
    copy = _empty_copy(model)
    layers = _layer_list(copy)
    trace = _Trace(copy, layers)
    trace.run()
    before, after = trace.sides()
    return Anatomy(
        layers=layers,
        n_layers=len(copy.get_submodule(layers)),
        before=before,
        after=after,
        returns_tuple=trace.returns_tuple,
        hidden_size=hidden_size(copy),
        counts_tokens=trace.counts_tokens,
    )


def _empty_copy(model: Any) -> Any:
    try:
        with torch.device("meta"):
            # BF16, since grouped matrix products refuse FP32 on this device.
            return type(model)(model.config).to(torch.bfloat16).eval()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refusal(model, f"cannot be built from its configuration alone ({error})") from error


def _layer_list(model: Any) -> str:
    n = model.config.get_text_config().num_hidden_layers
    found = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == n and sum(1 for _ in part.parameters()) >= n
    ]
    outermost = [name for name in found if not any(name.startswith(f"{other}.") for other in found)]
    if len(outermost) != 1:
        raise _refusal(model, f"has {len(outermost)} lists of {n} layers, where one is needed ({outermost})")
    return str(outermost[0])


class _Trace:
    """One forward pass of an empty model and what its hooks saw."""

    def __init__(self, model: Any, layers: str) -> None:
        self._model, self._layers = model, layers
        self._blocks = list(model.get_submodule(layers))
        self._calls: list[int] = []
        self._runs: dict[str, set[str]] = {name: set() for name, _ in siblings(model, layers)}
        self._last: Tensor | None = None
        self._loss: Tensor | None = None
        self.returns_tuple = False
        self.counts_tokens = False

    def run(self) -> None:
        """Run it; refuse what a split would compute wrongly."""
        for name, part in siblings(self._model, self._layers):
            part.register_forward_pre_hook(lambda *_, name=name: self._runs[name].add(self._phase()))
        for number, block in enumerate(self._blocks):
            block.register_forward_pre_hook(
                lambda _, args, kwargs, number=number: self._enter(number, args, kwargs), with_kwargs=True
            )
            block.register_forward_hook(lambda _, __, output, number=number: self._leave(number, output))
        loss = self._forward()
        # Auxiliary losses may also be added in place.
        unchanged = self._loss is not None and loss is self._loss and self._loss._version == 0
        self.counts_tokens = self.counts_tokens and unchanged
        if self._calls != list(range(len(self._blocks))):
            raise _refusal(self._model, f"calls its layers in the order {self._calls}, not once each")

    def _forward(self) -> Any:
        ids = torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
        count = torch.ones((), device="meta")
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if _accepts(self._model.forward, "num_items_in_batch"):
            arguments |= {"labels": ids, "num_items_in_batch": count}
            self._model.loss_function = lambda *args, **kwargs: self._record_loss(count, kwargs)
        with torch.enable_grad(), _NoValues():
            return self._model(**arguments)["loss" if "labels" in arguments else "logits"]

    def _record_loss(self, count: Tensor, arguments: dict[str, Any]) -> Tensor:
        self.counts_tokens = arguments.get("num_items_in_batch") is count
        self._loss = torch.zeros((), device="meta")
        return self._loss

    def _phase(self) -> str:
        if not self._calls:
            return "before"
        return "after" if len(self._calls) == len(self._blocks) else "between"

    def _enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if self._calls and hidden is not self._last:
            raise _refusal(self._model, f"changes the hidden states between layers {number - 1} and {number}")
        others = tree_leaves([args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}])
        if any(isinstance(value, Tensor) and value.requires_grad for value in others):
            raise _refusal(self._model, f"gives layer {number} more that is trained than the hidden states")
        self._calls.append(number)

    def _leave(self, number: int, output: Any) -> None:
        self.returns_tuple = isinstance(output, tuple)
        self._last = output[0] if isinstance(output, tuple) else output

    def sides(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the modules that run before and after the layers. A module that never runs is put after."""
        for name, phases in self._runs.items():
            if len(phases) > 1 or "between" in phases:
                raise _refusal(self._model, f"calls {name} {' and '.join(sorted(phases))} the layers")
        before = frozenset(name for name, phases in self._runs.items() if phases == {"before"})
        return before, frozenset(self._runs) - before


def siblings(model: nn.Module, layers: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules with parameters beside the way to the list of layers, with their names."""
    chain = chain_of(model, layers)
    for (prefix, outer), (_, inner) in pairwise(chain):
        if next(outer.parameters(recurse=False), None) is not None:
            raise _refusal(model, f"has parameters of its own on {type(outer).__name__}")
        for name, child in outer.named_children():
            if child is not inner and next(child.parameters(), None) is not None:
                yield (f"{prefix}.{name}" if prefix else name), child


def _refuse_additions(model: nn.Module, anatomy: Anatomy) -> None:
    known = anatomy.before | anatomy.after
    added = sorted(name for name, _ in siblings(model, anatomy.layers) if name not in known)
    if added:
        raise _refusal(model, f"has {', '.join(added)}, which no model of its configuration has")


def _refuse_sharing(model: nn.Module, anatomy: Anatomy) -> None:
    """Only what runs before the layers may share weights with what runs after them: an embedding with the head."""
    layers = model.get_submodule(anatomy.layers).named_children()
    parts = [*((f"{anatomy.layers}.{number}", layer) for number, layer in layers), *siblings(model, anatomy.layers)]
    owners: dict[int, str] = {}
    for name, part in parts:
        for parameter in part.parameters():
            owner = owners.setdefault(id(parameter), name)
            if owner != name and not {owner, name} <= anatomy.before | anatomy.after:
                raise _refusal(model, f"has a weight that {owner} and {name} share")


def _accepts(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class _NoValues(TorchDispatchMode):
    """Answers 0 or False where the model asks for a value that a meta tensor does not have, as in ``if mask.all()``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _refusal(model: Any, what: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} {what}.",
        where="pipeline stages",
        fix="It cannot be split into stages: use pipeline_parallel_size=1.",
    )
