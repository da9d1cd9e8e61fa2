"""What adapters and which quantisation a strategy is to put into a model, as checked values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_swift.errors import ConfigurationError

__all__ = ["AdapterSettings", "LoraSettings", "Quantization"]

Quantization = Literal["nf4", "int8"]


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters as peft makes them; the strategy that is given them puts them into the model.

    Args:
        r: Rank of the adapters.
        alpha: Adapters are scaled by ``alpha / r``, or by ``alpha / sqrt(r)`` with ``rslora``.
        dropout: Probability with which elements of an adapter's input are dropped in training.
        target_modules: Layers that get an adapter: ``"all-linear"`` for all linear layers but the output head; a list
            of the last parts of their names (``["q_proj", "v_proj"]``); or one regular expression for whole names.
        rslora: Rank-stabilised scaling, for large ranks.
        dora: Train the magnitude of each weight row apart from its direction (weight-decomposed LoRA).

    Raises:
        ConfigurationError: A value that is not allowed.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        _check("r", self.r, type(self.r) is int and self.r > 0, "a whole number above 0")
        _check("alpha", self.alpha, self.alpha > 0, "a number above 0")
        _check("dropout", self.dropout, 0 <= self.dropout < 1, "a number from 0 to below 1")
        _check("target_modules", self.target_modules, bool(self.target_modules), '"all-linear" or names of layers')


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters together with the way in which the frozen weights under them are stored.

    Args:
        lora: The adapters, or None for none.
        quantization: ``"nf4"`` stores the frozen linear layers in 4 bits, ``"int8"`` in 8 bits; None leaves them.
        double_quant: With ``"nf4"``, quantise the scales as well, which saves about 0.4 bits per weight.

    Raises:
        ConfigurationError: A value that is not allowed, or options that do not go together.
    """

    lora: LoraSettings | None = None
    quantization: Quantization | None = None
    double_quant: bool = True

    def __post_init__(self) -> None:
        if self.lora is not None and not isinstance(self.lora, LoraSettings):
            raise ConfigurationError(
                f"lora={self.lora!r} is not a LoraSettings.", where="lora", fix="Give LoraSettings(r=16), for one."
            )
        if self.quantization is not None and self.quantization not in get_args(Quantization):
            raise ConfigurationError(
                f"quantization={self.quantization!r} is not one of {', '.join(get_args(Quantization))}.",
                where="quantization",
            )
        if self.quantization is not None and self.lora is None:
            raise ConfigurationError(
                f"quantization={self.quantization!r} freezes the linear layers, and without lora= nothing trains.",
                where="quantization and lora",
                fix="Give lora=LoraSettings(...) as well, or leave quantization out.",
            )

    @property
    def is_active(self) -> bool:
        """Whether there is anything to put into a model."""
        return self.lora is not None


def _check(name: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise ConfigurationError(f"{name}={value!r} is not {allowed}.", where="LoraSettings", fix=f"Change {name}.")
