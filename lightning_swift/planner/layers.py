"""Decoder layers of transformers on the :mod:`tape`, written line for line like their Python code.

Local variables matter here: they keep values alive as long as those of the original do.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_swift.planner._ops import Ops
from lightning_swift.planner.shape import ModelShape
from lightning_swift.planner.tape import Gradient, Value

__all__ = ["Part", "decoder_layer", "final_norm", "gathered"]


@dataclass(frozen=True)
class Part:
    """The share of a layer that one rank has.

    Args:
        shape: Sizes of the whole model.
        sparse: The feed-forward part is a mixture of experts.
        tokens: Rows on this rank where attention and feed-forward part compute.
        tensor: Ranks that share heads and feed-forward columns.
        sequence: Those ranks also share the rows outside attention and feed-forward part.
    """

    shape: ModelShape
    sparse: bool
    tokens: int
    tensor: int = 1
    sequence: bool = False

    @property
    def heads(self) -> float:
        """Query heads of this rank."""
        return self.shape.heads / self.tensor

    @property
    def rows(self) -> float:
        """Rows of the residual stream on this rank."""
        return self.tokens / self.tensor if self.sequence else self.tokens


def decoder_layer(ops: Ops, part: Part, hidden: Value) -> Value:
    """One decoder layer, pre-norm, with the extra norms of its family."""
    family = part.shape.family
    four = family.norms == 4
    residual = hidden
    hidden = _norm(ops, part, hidden)
    hidden = gathered(ops, part, hidden)
    hidden = _attention(ops, part, hidden)
    hidden = _scattered(ops, part, hidden)
    hidden = _norm(ops, part, hidden) if four else hidden
    hidden = ops.add(residual, hidden)
    residual = hidden
    hidden = _norm(ops, part, hidden)
    hidden = gathered(ops, part, hidden)
    hidden = _experts(ops, part, hidden) if part.sparse else _mlp(ops, part, hidden, part.shape.intermediate)
    hidden = _scattered(ops, part, hidden)
    hidden = _norm(ops, part, hidden) if four else hidden
    return ops.add(residual, hidden)


def final_norm(ops: Ops, part: Part, hidden: Value) -> Value:
    """The norm before the head."""
    return _norm(ops, part, hidden)


def _norm(ops: Ops, part: Part, x: Value) -> Value:
    return normalise(ops, part.shape.family.norm, x, part.shape.hidden)


def normalise(ops: Ops, kind: str, x: Value, features: int) -> Value:
    """A norm over the last ``features`` elements."""
    if kind == "layer":
        return _layer_norm(ops, x, features)
    if kind == "gemma":
        return _gemma_norm(ops, x, features)
    given = x.size
    x = ops.cast(x, 4)
    variance = ops.mean(ops.square(x), features)
    root = ops.unary(ops.unary(variance), save_output=True, temporaries=1)
    x = ops.mul(x, root)
    return ops.scale(ops.cast(x, given), features)


def _gemma_norm(ops: Ops, given: Value, features: int) -> Value:
    x = ops.cast(given, 4)
    output = ops.mul(x, ops.unary(ops.unary(ops.mean(ops.square(x), features)), save_output=True, temporaries=1))
    del x
    # Scaled in FP32, by one plus a weight that is cast first.
    return ops.cast(ops.scale(output, features, size=4), given.size)


def _layer_norm(ops: Ops, x: Value, features: int) -> Value:
    trained, nbytes = ops.arithmetic.full, x.nbytes
    weight = ops.arithmetic.weight
    size = 4 if ops.arithmetic.autocast else x.size
    statistics = ops.new(2 * 4 * x.n / features)

    def rule(grad: Gradient) -> list[Gradient | None]:
        found = ops.new(nbytes)
        if trained:
            ops.grow(features * weight)
            ops.grow(features * weight)
        return [found]

    return Value(x.n, size, ops.new(x.n * size), ops.node([x.node], rule, x.buffer, statistics))


def _attention(ops: Ops, part: Part, hidden: Value) -> Value:
    shape, family = part.shape, part.shape.family
    q, kv = shape.q / part.tensor, shape.kv / part.tensor
    if family.fused_qkv:
        return _fused_attention(ops, part, hidden, q, kv)
    query = ops.linear(hidden, (shape.hidden, q), bias=family.qkv_bias)
    query = _head_norm(ops, part, query, shape.q)
    key = ops.linear(hidden, (shape.hidden, kv), bias=family.qkv_bias)
    key = _head_norm(ops, part, key, shape.kv)
    value = ops.linear(hidden, (shape.hidden, kv), bias=family.qkv_bias)
    if family.rotary:
        query, key = _rotate(ops, part, query), _rotate(ops, part, key)
    mixed = ops.attention(query, key, value, part.heads * part.tokens, shape.heads // shape.kv_heads)
    del query, key, value
    return ops.linear(mixed, (q, shape.hidden), bias=family.out_bias)


def _fused_attention(ops: Ops, part: Part, hidden: Value, q: float, kv: float) -> Value:
    shape = part.shape
    joined = ops.linear(hidden, (shape.hidden, q + 2 * kv), bias=shape.family.qkv_bias)
    whole = joined.nbytes
    # Queries, keys and values are views of one tensor; its gradient is put together again by one more.
    gather = ops.node([joined.node], lambda grad: [ops.new(whole)])
    views = [Value(part.tokens * width, joined.size, joined.buffer, gather) for width in (q, kv, kv)]
    del joined
    query, key, value = views
    views.clear()
    mixed = ops.attention(query, key, value, part.heads * part.tokens, shape.heads // shape.kv_heads)
    del query, key, value
    return ops.linear(mixed, (q, shape.hidden), bias=shape.family.out_bias)


def _head_norm(ops: Ops, part: Part, x: Value, width: int) -> Value:
    family = part.shape.family
    if family.qk_norm == "none":
        return x
    return normalise(ops, family.norm, x, part.shape.head_dim if family.qk_norm == "head" else width)


def _rotate(ops: Ops, part: Part, x: Value) -> Value:
    """``x * cos + rotate_half(x) * sin``; the tables have the size of the residual stream's elements."""
    table = ops.arithmetic.stream or (4 if ops.arithmetic.autocast else ops.arithmetic.compute)
    direct = ops.constant(x, table)
    turned = _half_turned(ops, x)
    turned = ops.constant(turned, table)
    return ops.add(direct, turned)


def _half_turned(ops: Ops, x: Value) -> Value:
    nbytes, n, size = x.nbytes, x.n, x.size
    half = ops.new(nbytes / 2)
    out = ops.new(nbytes)
    del half
    # Two slices, each of whose gradients is a whole tensor of zeros with one half filled in.
    first = ops.node([x.node], lambda grad: [ops.new(nbytes)])
    second = ops.node([x.node], lambda grad: [ops.new(nbytes)])
    negated = ops.node([second], lambda grad: [ops.new(nbytes / 2)])
    return Value(n, size, out, ops.node([negated, first], lambda grad: [grad, grad]))


def _mlp(ops: Ops, part: Part, x: Value, width: int) -> Value:
    shape, family = part.shape, part.shape.family
    inner = width / part.tensor
    if not family.gated:
        up = ops.linear(x, (shape.hidden, inner), bias=family.mlp_bias)
        del x
        up = _composed_gelu(ops, up) if family.composed_gelu else ops.unary(up, save_input=True)
        return ops.linear(up, (inner, shape.hidden), bias=family.mlp_bias)
    gate = ops.unary(ops.linear(x, (shape.hidden, inner), bias=family.mlp_bias), save_input=True)
    up = ops.linear(x, (shape.hidden, inner), bias=family.mlp_bias)
    product = ops.mul(gate, up)
    del gate, up
    return ops.linear(product, (inner, shape.hidden), bias=family.mlp_bias)


def _composed_gelu(ops: Ops, x: Value) -> Value:
    """``0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))``, as GPT-2 writes it."""
    half = ops.constant(x)
    inner = ops.constant(ops.add(x, ops.constant(ops.unary(x, save_input=True, temporaries=2))))
    curve = ops.unary(inner, save_output=True)
    del inner
    curve = ops.shift(curve)
    return ops.mul(half, curve)


def _experts(ops: Ops, part: Part, x: Value) -> Value:
    """Router and grouped matrix products over (token, expert) pairs sorted by expert."""
    shape = part.shape
    pairs = part.tokens * shape.experts_per_token
    scores = _pick(ops, _router(ops, part, x), pairs)
    picked = _pick(ops, x, pairs * shape.hidden)
    width = shape.expert_intermediate / part.tensor
    both = ops.experts(picked, (shape.hidden, 2 * width), shape.experts)
    del picked
    gate, up = _halves(ops, both, pairs * width)
    del both
    product = ops.mul(ops.unary(gate, save_input=True), up)
    del gate, up
    down = ops.experts(product, (width, shape.hidden), shape.experts)
    del product
    weighted = ops.mul(down, scores)
    del down, scores
    weighted = _pick(ops, weighted, pairs * shape.hidden)
    out = ops.cast(_summed(ops, weighted, part.tokens * shape.hidden), x.size)
    del weighted
    if shape.shared_intermediate:
        out = ops.add(out, _mlp(ops, part, x, shape.shared_intermediate))
    return out


def _router(ops: Ops, part: Part, x: Value) -> Value:
    """Scores of the chosen experts: FP32 softmax over all of them, the largest few, divided by their sum."""
    shape = part.shape
    logits = ops.linear(x, (shape.hidden, shape.experts), block=False)
    probabilities = ops.unary(ops.cast(logits, 4), save_output=True)
    del logits
    whole, n = probabilities.nbytes, part.tokens * shape.experts_per_token
    indices = ops.new(8 * n)
    node = ops.node([probabilities.node], lambda grad: [ops.new(whole)], indices)
    chosen = ops.unary(Value(n, 4, ops.new(4 * n), node), save_input=True)
    del probabilities, node, indices
    return chosen if shape.family.scores_in_fp32 else ops.cast(chosen, ops.arithmetic.compute)


def _pick(ops: Ops, x: Value, n: float) -> Value:
    """``x[index]``, whose index is kept; the gradient is scattered into zeros."""
    nbytes = x.nbytes
    return Value(n, x.size, ops.new(n * x.size), ops.node([x.node], lambda grad: [ops.new(nbytes)]))


def _summed(ops: Ops, x: Value, n: float) -> Value:
    # The gradient of a sum is an expanded view, written out by the next operator.
    return Value(n, x.size, ops.new(n * x.size), ops.node([x.node], lambda grad: [grad]))


def _halves(ops: Ops, x: Value, n: float) -> tuple[Value, Value]:
    """Two views of a tensor; their gradients are put together in a new one."""
    nbytes = x.nbytes
    joined = ops.node([x.node], lambda grad: [ops.new(nbytes)])
    return Value(n, x.size, x.buffer, joined), Value(n, x.size, x.buffer, joined)


def gathered(ops: Ops, part: Part, x: Value) -> Value:
    """Under sequence parallelism the rows of all ranks come together before a block; its gradient is scattered."""
    if not part.sequence:
        return _reduced_backward(ops, part, x)
    nbytes = x.nbytes
    n = x.n * part.tensor
    return Value(n, x.size, ops.new(n * x.size), ops.node([x.node], lambda grad: [ops.new(nbytes)]))


def _reduced_backward(ops: Ops, part: Part, x: Value) -> Value:
    """The gradient of a block's input is summed over ranks, into a new tensor."""
    if part.tensor == 1:
        return x
    nbytes = x.nbytes
    return Value(x.n, x.size, x.buffer, ops.node([x.node], lambda grad: [ops.new(nbytes)]))


def _scattered(ops: Ops, part: Part, x: Value) -> Value:
    """The partial sums of a block's output are added over ranks, into a new tensor of this rank's rows."""
    if part.tensor == 1:
        return x
    whole = x.nbytes
    n = part.rows * part.shape.hidden
    found = ops.node([x.node], (lambda grad: [ops.new(whole)]) if part.sequence else (lambda grad: [grad]))
    return Value(n, x.size, ops.new(n * x.size), found)
