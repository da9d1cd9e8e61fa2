"""The precision plugin of the ZeRO strategies: DeepSpeed casts parameters, and inputs of modules are cast here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn import Module, ModuleDict, ModuleList
from typing_extensions import override

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.dtypes import PrecisionName
from lightning_swift.strategies._zero_optimizer import gradients_times

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import torch

__all__ = ["ZeROPrecision", "cast_inputs"]

# Under this name a LightningModule remembers the hooks that cast.
_CASTS = "_lightning_swift_casts"


class ZeROPrecision(DeepSpeedPrecision):
    """Leaves casting of parameters to DeepSpeed, which keeps buffers as they are, and divides no loss twice."""

    def __init__(self, precision: PrecisionName) -> None:
        super().__init__(precision)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        # Buffers that are made without a dtype would be rounded too.
        return nullcontext()

    @override
    def convert_input(self, data: Any) -> Any:
        # A cast of the whole batch would round what is no input of any module: targets of a regression.
        return data

    @override
    def backward(  # type: ignore[override]  # as Lightning's own for DeepSpeed
        self, tensor: Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        prepare = getattr(model, "loss_for_backward", None)
        if prepare is not None:
            tensor = prepare(tensor)
        elif is_overridden("backward", model):
            rank_zero_warn(
                f"{type(model).__name__}.backward is not called: DeepSpeed runs the backward pass. Change the loss in "
                "training_step instead."
            )
        # Lightning has divided the loss by the accumulation steps already; the engine would do it once more.
        strategy: Any = model.trainer.strategy
        strategy.model.backward(tensor, *args, **{"scale_wrt_gas": False, **kwargs})

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise ConfigurationError(
                "training_step returned None, and no rank can leave a step out on its own.",
                where=f"{type(model).__name__}.training_step",
                fix="Return a loss that is 0 (such as the sum of the outputs times 0).",
            )
        strategy: Any = model.trainer.strategy
        with gradients_times(strategy.model, strategy.take_gradient_factor()):
            return strategy.model.step(**kwargs)


def cast_inputs(module: Module, dtype: torch.dtype) -> None:
    """Have the modules directly below ``module`` cast the floating-point tensors they are called with to ``dtype``.

    A later call replaces what an earlier one has registered.
    """
    for handle in module.__dict__.pop(_CASTS, ()):
        handle.remove()
    module.__dict__[_CASTS] = [
        part.register_forward_pre_hook(_Cast(dtype), with_kwargs=True) for part in _called_parts(module)
    ]


class _Cast:
    """Casts what a module is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return apply_to_collection((args, kwargs), Tensor, self._cast)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _called_parts(module: Module) -> Iterator[Module]:
    """Children with parameters to compute with; lists of modules are never called themselves."""
    for child in module.children():
        if isinstance(child, ModuleList | ModuleDict):
            yield from _called_parts(child)
        elif any(parameter.is_floating_point() for parameter in child.parameters()):
            yield child
