"""Builds the model of a trace: transformers' own layer code, with an attention that allocates as a GPU's would.

Under fake tensors transformers makes an explicit causal mask and repeats keys and values, which no GPU run does; the
attention registered here allocates what FlashAttention-2 allocates. Quantised layers and adapters are stand-ins of
the same bytes: bitsandbytes' parameters cannot be fake, and importing peft takes longer than the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ATTENTION", "block_list", "build_model", "register_attention"]

# The name must not contain "flash": transformers then looks for the package.
ATTENTION = "lightning_swift_planner"
_TABLE = 256


class _Attention(torch.autograd.Function):
    """Forward keeps q, k, v, output and log-sum-exp; backward makes an FP32 dq and expanded dk and dv."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, length, width = query.shape
        # A product over no elements: an operator that selective checkpointing keeps, as it keeps a GPU's attention.
        nothing = query.new_empty((batch, length, 0)), query.new_empty((batch, 0, heads * width))
        out = torch.bmm(*nothing).view(batch, length, heads, width).transpose(1, 2)
        statistics = query.new_empty((batch, heads, length), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _value, _out, statistics = ctx.saved_tensors
        batch, heads, length, width = query.shape
        groups = key.shape[1]
        accumulator = query.new_empty(query.shape, dtype=torch.float32)
        sums = torch.empty_like(statistics)
        dq = query.new_empty((batch, length, heads, width)).transpose(1, 2)
        if groups == heads:
            pair = [query.new_empty((batch, length, heads, width)).transpose(1, 2) for _ in range(2)]
        else:
            wide = [query.new_empty((batch, length, heads, width)) for _ in range(2)]
            shape = (batch, length, groups, heads // groups, width)
            pair = [whole.view(shape).sum(3).transpose(1, 2) for whole in wide]
        del accumulator, sums
        return dq, pair[0], pair[1]


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Tell transformers about the attention above, and that it wants no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)


class _Nf4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return x @ layer.expanded(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.layer.expanded(grad.dtype), None


class _QuantisedLinear(nn.Module):
    """The bytes of a 4-bit NF4 weight with doubly quantised scales, and its dense copy in every pass."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.dense_shape = (base.out_features, base.in_features)
        n = base.weight.numel()
        device = base.weight.device
        self.register_buffer("packed", torch.empty(n // 2, 1, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(-(-n // 64), dtype=torch.uint8, device=device))
        self.register_buffer("outer", torch.empty(-(-n // 64 // _TABLE), dtype=torch.float32, device=device))

    def expanded(self, dtype: torch.dtype) -> Tensor:
        packed, stored = self.get_buffer("packed"), self.get_buffer("scales")
        scales = torch.empty(stored.shape, dtype=torch.float32, device=stored.device)
        dense = torch.empty(self.dense_shape, dtype=dtype, device=packed.device)
        del scales
        return dense

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Nf4.apply(x, self)
        return out


class _AdaptedLinear(nn.Module):
    """peft's LoRA linear layer: ``base(x) + B(A(dropout(x.to(dtype)))) * scale``, cast back; DoRA as peft writes it."""

    def __init__(self, base: nn.Module, sizes: tuple[int, int], request: Mapping[str, Any]) -> None:
        super().__init__()
        self.base = base
        (fan_in, fan_out), rank = sizes, request["lora_r"]
        device = next(iter([*base.parameters(), *base.buffers()])).device
        kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, request["adapter_dtype"])}
        self.down = nn.Linear(fan_in, rank, bias=False, **kind)
        self.up = nn.Linear(rank, fan_out, bias=False, **kind)
        self.dropout: nn.Module = nn.Dropout(0.1) if request["dropout"] else nn.Identity()
        self.magnitude = nn.Parameter(torch.empty(fan_out, **kind)) if request["dora"] else None

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        kind = result.dtype
        x = self.dropout(x.to(self.down.weight.dtype))
        if self.magnitude is None:
            result = result + self.up(self.down(x)) * 2.0
        else:
            result = result + self._dora(x, result, self.magnitude)
        cast: Tensor = result.to(kind)
        return cast

    def _dora(self, x: Tensor, result: Tensor, magnitude: Tensor) -> Tensor:
        eye = torch.eye(self.down.in_features, device=x.device, dtype=self.down.weight.dtype)
        product = self.up(self.down(eye)).T
        del eye
        product = product.to(x.dtype)
        base: Any = self.base
        weight = base.expanded(torch.bfloat16) if isinstance(base, _QuantisedLinear) else base.weight
        weight = weight.to(x.dtype)
        norm = torch.linalg.norm(weight + 2.0 * product.detach(), dim=1).to(weight.dtype)
        scale = (magnitude / norm.detach()).view(1, -1)
        adapted = self.up(self.down(x))
        whole = result if isinstance(self.dropout, nn.Identity) else functional.linear(x, weight)
        added: Tensor = (scale - 1) * whole + scale * adapted * 2.0
        return added


def build_model(config: Mapping[str, Any], request: Mapping[str, Any], device: str) -> nn.Module:
    """The model of ``config`` with ``request["layers"]`` layers, adapters and quantised layers as asked for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    kind = values.pop("model_type")
    for key in ("dtype", "torch_dtype", "quantization_config", "architectures", "layer_types"):
        values.pop(key, None)
    built = AutoConfig.for_model(kind, **values)
    depth = "n_layer" if hasattr(built, "n_layer") else "num_hidden_layers"
    setattr(built, depth, request["layers"])
    if getattr(built, "layer_types", None):
        built.layer_types = built.layer_types[: request["layers"]]
    dtype = getattr(torch, request["weight_dtype"])
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(built, dtype=dtype, attn_implementation=ATTENTION)
    model.train()
    if request["lora_r"]:
        _adapt(model, request)
    return model


def _adapt(model: nn.Module, request: Mapping[str, Any]) -> None:
    model.requires_grad_(False)
    for block in block_list(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    base = _QuantisedLinear(child) if request["quantised"] else child
                    sizes = (child.in_features, child.out_features)
                    setattr(parent, name, _AdaptedLinear(base, sizes, request))


def block_list(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, in order."""
    from lightning_swift.parallel.blocks import find_blocks

    return [block for _, block in find_blocks(model)]
