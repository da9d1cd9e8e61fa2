"""Parameter-free modules that stand where a part of the model lives on another pipeline stage.

The model's own forward runs on every stage, on a placeholder that takes no memory, so its masks, rotary tables and
multipliers need no code here. Stubs let the placeholder through; the one before the first own layer exchanges it for
what was received, and the one after the last own layer keeps what is to be sent. They are modules and no hooks, so
checkpointing and compilation of the layers do not matter to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["EmbeddingStub", "Entry", "Exit", "Stub"]


class Stub(nn.Module):
    """Returns its first input.

    Args:
        like: The module that it stands for; plain values that the model may read from it are kept.
        as_tuple: Whether to return the input as the only entry of a tuple.
    """

    def __init__(self, like: nn.Module, *, as_tuple: bool = False) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(like).items() if isinstance(v, str | int | float) and not k.startswith("_")}
        self.__dict__.update(plain)
        self.as_tuple = as_tuple

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _first(args, kwargs)
        return (hidden,) if self.as_tuple else hidden


class EmbeddingStub(nn.Module):
    """Returns zeros of shape ``[*input, size]`` that take no memory."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        index = _first(args, kwargs)
        return torch.zeros((), device=index.device).expand(*index.shape, self.size)


class Entry(Stub):
    """Returns what was received from the stage before; set ``received`` before each forward pass."""

    received: Tensor | None = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, self.received = self.received, None
        return (hidden,) if self.as_tuple else hidden


class Exit(Stub):
    """Keeps its input, which is to be sent to the stage after, until it is taken."""

    _kept: Tensor | None = None

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._kept = _first(args, kwargs)
        return super().forward(*args, **kwargs)

    def take(self) -> Any:
        """What was kept, once."""
        kept, self._kept = self._kept, None
        return kept


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    return kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))
