"""Which options of :class:`CausalLM` a strategy cannot have; said before any weights are read."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy

from lightning_swift.errors import ConfigurationError

__all__ = ["check_limits"]


def check_limits(trainer: Any, *, chunked: bool, optimizer: str) -> None:
    """Refuse what cannot work.

    Args:
        trainer: The Trainer, or None outside of one.
        chunked: Whether the loss is computed in chunks.
        optimizer: Its name, as of ``CausalLM(optimizer=...)``.

    Raises:
        ConfigurationError: With the cure.
    """
    if trainer is None:
        return
    if chunked and _cuts_the_model(trainer.strategy):
        raise ConfigurationError(
            f"{type(trainer.strategy).__name__} cuts the head or the layers before it over ranks, and a loss in "
            "chunks needs them together.",
            where="CausalLM(loss='chunked')",
            fix="Use loss='huggingface' here; loss_parallel=True keeps logits cut under tensor parallelism.",
        )
    if optimizer == "adamw_8bit" and trainer.training:
        _check_eight_bit(trainer.strategy)


def _cuts_the_model(strategy: Strategy) -> bool:
    sizes = getattr(strategy, "mesh_sizes", None)
    return sizes is not None and (sizes.tp > 1 or sizes.pp > 1)


def _check_eight_bit(strategy: Strategy) -> None:
    where = "CausalLM(optimizer='adamw_8bit')"
    whole = isinstance(strategy, DDPStrategy | SingleDeviceStrategy) and not isinstance(strategy, DeepSpeedStrategy)
    if not whole:
        raise ConfigurationError(
            f"bitsandbytes' optimizer needs whole parameters, and {type(strategy).__name__} cuts them or their states "
            "over ranks.",
            where=where,
            fix="Use DDPBF16Strategy, or optimizer='adamw_fused': cut states are small already.",
        )
    if find_spec("bitsandbytes") is None:
        raise ConfigurationError(
            "bitsandbytes is not installed.", where=where, fix="pip install bitsandbytes, or use optimizer='adamw'."
        )
