"""LoRA and DoRA beside a linear layer on the :mod:`tape`, as peft computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_swift.planner._arithmetic import Adapter
from lightning_swift.planner.tape import Buffer, Gradient, Value

if TYPE_CHECKING:
    from lightning_swift.planner._ops import Ops

__all__ = ["adapted"]


def adapted(ops: Ops, x: Value, base: Value, features: tuple[float, float], adapter: Adapter) -> Value:
    """``base + B(A(x)) * scale`` in the adapter's dtype, cast back; under DoRA with magnitudes.

    Args:
        ops: The operators.
        x: Input of the layer.
        base: Its output without adapters.
        features: Its input and output features.
        adapter: Rank, dtype and kind.
    """
    fan_out, size = features[1], adapter.size
    x = ops.cast(x, size)
    if adapter.dropout:
        x = _dropout(ops, x)
    norm = _weight_norm(ops, features, adapter) if adapter.dora else []
    high = _pair(ops, x, features, adapter)
    if adapter.dora:
        # (m - 1) * base + m * high * scale; with dropout the base is computed once more.
        whole = _frozen(ops, x, features, size) if adapter.dropout else base
        scaled = _magnified(ops, whole, fan_out, size)
        del whole
        high = ops.add(scaled, ops.constant(_magnified(ops, high, fan_out, size)))
        del scaled
    else:
        high = ops.constant(high)
    del x
    norm.clear()
    total = ops.add(base, high)
    del high
    return ops.cast(total, base.size)


def _frozen(ops: Ops, x: Value, features: tuple[float, float], size: int) -> Value:
    return ops.plain_linear(x, features, trained=False, bias=False, block=False, size=size)


def _pair(ops: Ops, x: Value, features: tuple[float, float], adapter: Adapter) -> Value:
    (fan_in, fan_out), size = features, adapter.size
    low = ops.plain_linear(x, (fan_in, adapter.rank), trained=True, bias=False, block=False, size=size)
    del x
    return ops.plain_linear(low, (adapter.rank, fan_out), trained=True, bias=False, block=False, size=size)


def _weight_norm(ops: Ops, features: tuple[float, float], adapter: Adapter) -> list[Value | Buffer]:
    """DoRA's norm, from dense copies of the weight: what stays until the layer is done."""
    fan_in, fan_out = features
    size, weights, arithmetic = adapter.size, fan_in * fan_out, ops.arithmetic
    # The product of both adapters is what they make of the identity.
    eye = Value(fan_in * fan_in, size, ops.new(fan_in * fan_in * size), None)
    product = ops.cast(_pair(ops, eye, features, adapter), size)
    del eye
    held: list[Value | Buffer] = [product]
    if arithmetic.quantised != "none" or arithmetic.weight != size:
        held.append(ops.new(weights * size))
    copies = [ops.new(weights * size) for _ in range(2)]
    copies.clear()
    return held


def _magnified(ops: Ops, x: Value, features: float, weight: int) -> Value:
    """``m * x`` with a trained vector ``m``."""
    size, n, like = max(x.size, weight), x.n, x.size

    def rule(grad: Gradient) -> list[Gradient | None]:
        found = ops.shaped(n, size, n, like)
        whole = ops.new(n * size)
        ops.grow(features * weight)
        del whole
        return [found]

    return Value(n, size, ops.new(n * size), ops.node([x.node], rule, x.buffer))


def _dropout(ops: Ops, x: Value) -> Value:
    nbytes = x.nbytes
    mask = ops.new(x.n)
    return Value(x.n, x.size, ops.new(nbytes), ops.node([x.node], lambda grad: [ops.new(nbytes)], mask))
