"""Learnable parts that no published plan names, put into the blocks of a tiny Llama by a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness.models import tiny_model

__all__ = ["changed"]


class HeadScale(nn.Module):
    """One learnable number for each head; ``x`` is ``[batch, sequence, heads * size]``."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size, self.scale = size, nn.Parameter(torch.linspace(0.5, 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], -1, self.size)
        return (heads * self.scale[:, None]).flatten(-2)


class FeatureScale(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2, features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class AcrossFeatures(nn.Module):
    """A learnable temperature of a softmax over all features: a rank that has a part of them computes another one."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.softmax(x * self.temperature, dim=-1)


class TwicePart(nn.Module):
    """One learnable number used on the sharded activation and again on the summed output of the MLP."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x) * self.scale)
        return self.scale * product


class NormedMLP(nn.Module):
    """An MLP that norms its own input, as BitNet-like blocks do, with a dropout in front."""

    def __init__(self, mlp: Any, features: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.norm, self.dropout = nn.LayerNorm(features), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(x))
        product: Tensor = self.down_proj(torch.sigmoid(self.gate_proj(x)) * self.up_proj(x))
        return product


def _prelu(layer: Any) -> None:
    layer.mlp.act_fn = nn.PReLU(init=0.3)


def _bias(layer: Any) -> None:
    layer.self_attn.o_proj.bias = nn.Parameter(torch.linspace(-0.1, 0.1, 64))


def _heads(layer: Any) -> None:
    layer.mlp.act_fn = HeadScale(8, 16)


def _features(layer: Any) -> None:
    layer.mlp.act_fn = FeatureScale(128)


def _across(layer: Any) -> None:
    layer.mlp.act_fn = AcrossFeatures()


def _twice(layer: Any) -> None:
    layer.mlp = TwicePart(layer.mlp)


def _normed(layer: Any) -> None:
    layer.mlp = NormedMLP(layer.mlp, 64)


_CHANGES: dict[str, Callable[[Any], None]] = {
    "prelu": _prelu,
    "bias": _bias,
    "heads": _heads,
    "features": _features,
    "across": _across,
    "twice": _twice,
    "normed": _normed,
}


def changed(change: str) -> Any:
    """A tiny Llama, each layer of which has been changed."""
    model = tiny_model(layers=2).train()
    for layer in model.model.layers:
        _CHANGES[change](layer)
    return model
