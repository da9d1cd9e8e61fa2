"""The precision plugin of the ZeRO strategies: DeepSpeed casts parameters, and inputs are cast here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.dtypes import PrecisionName
from lightning_swift.strategies._zero_optimizer import gradients_times

if TYPE_CHECKING:
    import lightning.pytorch as pl

__all__ = ["ZeROPrecision"]


class ZeROPrecision(DeepSpeedPrecision):
    """Leaves casting of parameters to DeepSpeed, which keeps buffers as they are, and divides no loss twice."""

    def __init__(self, precision: PrecisionName) -> None:
        super().__init__(precision)

    @override
    def convert_module(self, module: Module) -> Module:
        # A cast of the whole module would round rotary tables and running statistics too.
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext()

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
