"""The self-check of tensor parallelism: one layer of each kind, whole and cut, on the same random values.

It decides by numbers, not by names of models, whose gradients are partial: a parameter that no plan names, such as a
learnable activation function between two cut layers, sees only a part of the activations and gets only a part of its
gradient. It also refuses a plan under which a layer computes something else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_swift.errors import ModelError
from lightning_swift.parallel._tensor_layers import Layout, blocks_of, cut_layer
from lightning_swift.parallel.anatomy import Anatomy
from lightning_swift.parallel.plans import Planned, listed

__all__ = ["Layer", "partial_in_layers"]

_ROWS = 2
_SEED = 7
# Float32 rounding of one layer stays below 1e-5; a missing or doubled part of a gradient differs in the first digits.
_TOLERANCE = 1e-3
# Relative to the largest gradient of the layer, what rounding leaves of a gradient that is zero.
_NOISE = 1e-5
# What a module raises when it is given shapes or kinds of tensors that it is not made for.
_MISFITS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Layer:
    """A decoder layer of the model and the part of the plan that is about it, by names relative to it."""

    number: int
    name: str
    module: nn.Module
    entries: tuple[Planned, ...]

    def kind(self) -> tuple[object, ...]:
        """Equal for layers that are cut in the same way."""
        modules = tuple((name, type(part)) for name, part in self.module.named_modules())
        parameters = tuple((n, tuple(p.shape), p.requires_grad) for n, p in self.module.named_parameters())
        return modules, parameters, tuple((entry.name, entry.style) for entry in self.entries)


def partial_in_layers(model: Any, anatomy: Anatomy, layers: list[Layer], layout: Layout) -> dict[str, bool]:
    """For each trainable parameter of ``layers`` that stays whole, by full name: is its gradient partial?

    Runs each kind of layer once, in evaluation mode and float32, on copies; about one layer's memory more is in use
    meanwhile. All ranks of the mesh take part.

    Raises:
        ModelError: A layer cannot run when it is cut, computes something else, or has a parameter whose gradient is
            neither whole nor partial, or is zero so that nothing can be said.
    """
    groups: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.kind(), []).append(layer)
    examples = {group[0].number: group[0] for group in groups.values()}
    calls = _record_calls(model, anatomy, examples, layout)
    found: dict[str, bool] = {}
    for group in groups.values():
        verdict = _examine(group[0], calls[group[0].number], layout)
        found |= {f"{layer.name}.{name}": partial for layer in group for name, partial in verdict.items()}
    return found


@dataclass(frozen=True)
class _Call:
    """A layer of a skeleton of the model, and what the model calls it with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        if self.args:
            output = module(hidden, *self.args[1:], **self.kwargs)
        else:
            output = module(**{**self.kwargs, "hidden_states": hidden})
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result


class _Recorder(nn.Module):
    """Stands in for a layer: keeps what it is called with and gives its input back."""

    def __init__(self, layer: nn.Module, as_tuple: bool) -> None:
        super().__init__()
        # Not a submodule: the recorder answers for the layer's attributes only.
        object.__setattr__(self, "layer", layer)
        self.as_tuple = as_tuple
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.call = args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self.as_tuple else hidden


def _record_calls(model: Any, anatomy: Anatomy, examples: Mapping[int, Layer], layout: Layout) -> dict[int, _Call]:
    """Run the model's own preamble on a skeleton, to learn what its layers are called with."""
    device = torch.device(layout.mesh.device_type)
    skeleton = _skeleton(model, device)
    stack = skeleton.get_submodule(anatomy.layers)
    layers = list(stack)
    recorders = [_Recorder(layer, anatomy.returns_tuple) for layer in layers]
    for number, recorder in enumerate(recorders):
        stack[number] = recorder
    length = 4 * layout.mesh.size()
    with torch.no_grad():
        base = getattr(skeleton, skeleton.base_model_prefix, skeleton)
        base(inputs_embeds=torch.zeros(_ROWS, length, anatomy.hidden_size, device=device), use_cache=False)
    calls: dict[int, _Call] = {}
    for number in examples:
        args, kwargs = recorders[number].call or ((), {})
        calls[number] = _Call(layers[number], *_detached((args, kwargs)))
    return calls


def _skeleton(model: Any, device: torch.device) -> Any:
    """A copy of the model whose parameters take no memory: they are the model's own, or zeros that are one number."""

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.is_meta and parameter.device == device:
            return parameter
        zeros = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
        return nn.Parameter(zeros, requires_grad=parameter.requires_grad)

    skeleton = _copy(model, stand_in).eval()
    for module in skeleton.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
    # Fused kernels want half precision or a device; the check needs neither.
    skeleton.set_attn_implementation("eager")
    if hasattr(skeleton.config, "_experts_implementation"):
        skeleton.set_experts_implementation("eager")
    return skeleton


def _copy(module: Any, make: Callable[[nn.Parameter], nn.Parameter]) -> Any:
    """A deep copy with other parameters, made one by one; buffers are shared."""
    memo: dict[int, Any] = {id(parameter): make(parameter) for parameter in module.parameters()}
    memo |= {id(buffer): buffer for buffer in module.buffers()}
    return copy.deepcopy(module, memo)


def _detached(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _examine(layer: Layer, call: _Call, layout: Layout) -> dict[str, bool]:
    whole = _copy(call.module, _random_values(torch.device(layout.mesh.device_type)))
    cut = _copy(whole, lambda parameter: parameter)
    problem: str | None = None
    verdict: dict[str, bool] = {}
    try:
        cut_layer(cut, layer.entries, layout)
        comparison = _Comparison(call, whole, cut, layout)
    except _MISFITS as error:
        problem = f"cannot run ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    else:
        problem, verdict = comparison.outcome()
        blocks = tuple(f"{name}." for name in blocks_of(layer.entries))
        unused = sorted(name for name in comparison.unused() if name.startswith(blocks))
        if problem is None and unused:
            problem = f"does not use all of its parameters for random tokens ({listed(unused)}): freeze or name them"
    if problem is None:
        return verdict
    raise ModelError(
        f"when it is cut over {layout.mesh.size()} ranks by its plan, the layer {problem}.",
        where=layer.name,
        fix="Correct tp_plan: modules between a 'colwise' and a 'rowwise' layer see a part of the features, and those "
        "with weights for each feature or head need 'shard' or 'colwise' too. Or use tensor_parallel_size=1.",
    )


def _random_values(device: torch.device) -> Callable[[nn.Parameter], nn.Parameter]:
    generator = torch.Generator(device).manual_seed(_SEED)

    def make(parameter: nn.Parameter) -> nn.Parameter:
        values = torch.randn(parameter.shape, generator=generator, device=device)
        if parameter.dim() > 1:
            values /= parameter.shape[-1] ** 0.5
        else:
            values = 0.5 + 0.25 * values
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    return make


class _Comparison:
    """Output, input gradient and gradients of the parameters that stay whole, of a layer whole and cut."""

    def __init__(self, call: _Call, whole: nn.Module, cut: nn.Module, layout: Layout) -> None:
        self._layout = layout
        hidden = call.kwargs["hidden_states"] if not call.args else call.args[0]
        generator = torch.Generator(hidden.device).manual_seed(_SEED)
        x, toward = (torch.randn(hidden.shape, generator=generator, device=hidden.device) for _ in range(2))
        after = dict(cut.named_parameters())
        self._names = [n for n, p in after.items() if p.requires_grad and not isinstance(p, DTensor)]
        self._expected = _gradients(call, whole, x, toward, self._names)
        self._found = _gradients(call, cut, self._mine(x), self._mine(toward), self._names)

    def unused(self) -> set[str]:
        """Names of the parameters that the whole layer did not use."""
        return {name for name, found in zip(self._names, self._expected.at_parameters, strict=True) if found is None}

    def outcome(self) -> tuple[str | None, dict[str, bool]]:
        """What is wrong, the same on all ranks, or None; and whose gradients are partial."""
        expected, found = self._expected, self._found
        own = [_distance(found.output, self._mine(expected.output)), _distance(found.at_input, self._at_input())]
        gradients, parts = expected.filled(), found.filled()
        sums = [self._summed(part) for part in parts]
        # What is this small beside the other gradients of the layer is the rounding of zero.
        floor = _NOISE / _TOLERANCE * max((float(g.abs().max()) for g in (expected.at_input, *gradients)), default=0.0)
        whole = [_distance(part, gradient, floor) for part, gradient in zip(parts, gradients, strict=True)]
        summed = [_distance(part, gradient, floor) for part, gradient in zip(sums, gradients, strict=True)]
        errors = torch.tensor([*own, *whole, *summed], device=found.output.device)
        dist.all_reduce(errors, op=dist.ReduceOp.MAX, group=self._layout.mesh.get_group())
        values = errors.tolist()
        if max(values[:2]) > _TOLERANCE:
            what = "output" if values[0] > _TOLERANCE else "gradient of the input"
            return f"computes something else ({what} differs by {max(values[:2]):.1e} of its largest element)", {}
        return self._judge(values[2 : 2 + len(parts)], values[2 + len(parts) :])

    def _judge(self, whole: list[float], summed: list[float]) -> tuple[str | None, dict[str, bool]]:
        fits = {n: (a <= _TOLERANCE, b <= _TOLERANCE) for n, a, b in zip(self._names, whole, summed, strict=True)}
        neither = [name for name, fit in fits.items() if not any(fit)]
        if neither:
            return f"has gradients that are neither whole nor a part of a sum ({listed(neither)})", {}
        # Both fit where the gradient is zero, such as that of a bias of attention keys: there is nothing to sum.
        return None, {name: is_sum and not is_whole for name, (is_whole, is_sum) in fits.items()}

    def _at_input(self) -> Tensor:
        return self._mine(self._expected.at_input)

    def _summed(self, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total, group=self._layout.mesh.get_group())
        return total

    def _mine(self, value: Tensor) -> Tensor:
        if not self._layout.sequence:
            return value
        mesh = self._layout.mesh
        return value.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()


@dataclass(frozen=True)
class _Gradients:
    """What one run of a layer gave: output, and gradients at the input and at parameters; None where unused."""

    output: Tensor
    at_input: Tensor
    at_parameters: tuple[Tensor | None, ...]
    parameters: tuple[nn.Parameter, ...]

    def filled(self) -> list[Tensor]:
        pairs = zip(self.at_parameters, self.parameters, strict=True)
        return [torch.zeros_like(parameter) if found is None else found for found, parameter in pairs]


def _gradients(call: _Call, module: nn.Module, hidden: Tensor, toward: Tensor, names: Iterable[str]) -> _Gradients:
    named = dict(module.named_parameters())
    parameters = tuple(named[name] for name in names)
    hidden = hidden.clone().requires_grad_()
    with torch.enable_grad():
        output = call.run(module, hidden)
        at_input, *others = torch.autograd.grad((output * toward).sum(), [hidden, *parameters], allow_unused=True)
    at_input = torch.zeros_like(hidden) if at_input is None else at_input
    return _Gradients(output.detach(), at_input, tuple(others), parameters)


def _distance(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Largest difference relative to the largest element of either, or to ``floor`` if that is larger."""
    scale = max(float(expected.abs().max()), float(found.abs().max()), floor, torch.finfo(torch.float32).tiny)
    return float((found - expected).abs().max()) / scale
