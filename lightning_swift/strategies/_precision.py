"""Precision as a matter of the strategy: the mesh engine's plugin, and the check of what the Trainer was asked for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, get_args

from lightning.pytorch.plugins.precision import DeepSpeedPrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.dtypes import PrecisionName
from lightning_swift.parallel.gradients import OtherStages, clip_by_norm, clip_by_value

__all__ = ["MeshPrecision", "OwnPrecision", "agree"]

# What Lightning makes of Trainer(precision=...); anything else was made by the user.
_FROM_TRAINER = (Precision, HalfPrecision, MixedPrecision, DeepSpeedPrecision)
# Lightning does not tell its default from an explicit "32-true".
_DEFAULT = "32-true"


class MeshPrecision(Precision):
    """Leaves casting to ``fully_shard`` (no autocast) and clips gradients whatever meshes they lie on.

    Attributes:
        other_stages: Set by the strategy where a pipeline's other ranks hold gradients too.
    """

    def __init__(self, precision: PrecisionName) -> None:
        self.precision = precision
        self.other_stages: OtherStages | None = None

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_norm(self.main_params(optimizer), clip_val, others=self.other_stages)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.main_params(optimizer), clip_val)


class OwnPrecision(ParallelStrategy):
    """Mixin for a strategy that brings its own precision plugin. It goes before the strategy's own base class.

    Attributes:
        chosen_by_name: True if the strategy was built from its registered name, so that the Trainer's precision
            decides between the BF16 ones.
    """

    chosen_by_name = False
    _precision: Any

    @property
    @override
    def precision_plugin(self) -> Precision:
        plugin: Precision = self._precision
        return plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # Lightning lets a plugin stored here win over Trainer(precision=...) silently, so none is.
        self._precision_plugin = None
        if precision_plugin is not None:
            own: PrecisionName = self._precision.precision
            self._use_precision(agree(type(self).__name__, own, precision_plugin, by_name=self.chosen_by_name))

    @abstractmethod
    def _use_precision(self, precision: PrecisionName) -> None:
        """Make ``precision`` that of the options and of the plugin."""


def agree(strategy: str, own: PrecisionName, plugin: Precision, *, by_name: bool) -> PrecisionName:
    """The precision to use, given the strategy's and the plugin that Lightning made for the Trainer's.

    Args:
        strategy: Name of the strategy, for messages.
        own: The strategy's precision.
        plugin: What Lightning would have used.
        by_name: The strategy was named, not built, so that nobody has chosen its precision; then the Trainer may.

    Raises:
        ConfigurationError: The Trainer asks for something else.
    """
    if type(plugin) not in (*_FROM_TRAINER, MeshPrecision):
        raise ConfigurationError(
            f"the plugin {type(plugin).__name__} would not be used: {strategy} brings its own precision.",
            where="Trainer(plugins=...)",
            fix=f"Leave it out and choose by {strategy}(precision=...).",
        )
    asked = str(plugin.precision)
    if asked in (own, _DEFAULT):
        return own
    if by_name and asked in get_args(PrecisionName):
        allowed: PrecisionName = "bf16-true" if asked == "bf16-true" else "bf16-mixed"
        return allowed
    raise ConfigurationError(
        f'Trainer(precision="{asked}") contradicts {strategy}(precision="{own}").',
        where="precision",
        fix=f"Leave the Trainer's precision out and choose by {strategy}(precision=...): "
        f"{', '.join(get_args(PrecisionName))}.",
    )
