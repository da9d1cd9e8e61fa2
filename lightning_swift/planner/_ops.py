"""The operators of a decoder on the :mod:`tape`: what each allocates, what it saves, what its backward allocates.

Each mirrors PyTorch's derivative formula (``tools/autograd/derivatives.yaml``), temporaries included.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_swift.planner._adapted import adapted
from lightning_swift.planner._arithmetic import Arithmetic
from lightning_swift.planner.tape import Buffer, Gradient, Ledger, Node, Recompute, Value, run_backward

__all__ = ["Ops"]


class Ops:
    """The operators, bound to a ledger and an arithmetic.

    Attributes:
        graph: Whether operators record themselves.
        keep: Outputs of matrix products that selective checkpointing keeps, while it records or replays.
        replaying: It replays.
        is_loss: What is made now belongs to the loss.
        shared: Where the gradient waits of a weight that several products share; None outside of them.
    """

    def __init__(self, ledger: Ledger, arithmetic: Arithmetic) -> None:
        self.ledger, self.arithmetic = ledger, arithmetic
        self.graph = True
        self.keep: list[Buffer] | None = None
        self.replaying = self.is_loss = False
        self.shared: list[Gradient] | None = None

    def new(self, nbytes: float) -> Buffer:
        """Fresh storage."""
        return Buffer(self.ledger, nbytes, is_loss=self.is_loss)

    def _product(self, nbytes: float) -> Buffer:
        """Storage of the output of a matrix product, which selective checkpointing keeps."""
        if self.keep is None:
            return self.new(nbytes)
        if self.replaying:
            return self.keep.pop(0)
        kept = self.new(nbytes)
        self.keep.append(kept)
        return kept

    def node(
        self, inputs: list[Node | None], rule: Callable[..., list[Gradient | None]], *saved: Buffer | None
    ) -> Node | None:
        """A node, if a gradient flows to any input."""
        if not self.graph or not any(inputs):
            return None
        return Node(self.ledger, inputs, rule, saved)

    def grow(self, nbytes: float) -> None:
        """A gradient arrives at a parameter: it stays there, or is added to the one that is there."""
        grad = self.new(nbytes)
        if not self.ledger.accumulate:
            self.ledger.gradients.append(grad)

    def unary(self, x: Value, *, save_input: bool = False, save_output: bool = False, temporaries: int = 0) -> Value:
        """An operator whose backward makes one tensor like its input (after ``temporaries`` more of them)."""
        nbytes = x.nbytes
        out = self.new(nbytes)
        saved = (x.buffer if save_input else None, out if save_output else None)

        def rule(grad: Gradient) -> list[Gradient | None]:
            held = [self.new(nbytes) for _ in range(temporaries)]
            found = self.new(nbytes)
            held.clear()
            return [found]

        return Value(x.n, x.size, out, self.node([x.node], rule, *saved))

    def cast(self, x: Value, size: int) -> Value:
        """``x.to(dtype)``."""
        if x.size == size:
            return x
        nbytes = x.nbytes
        return Value(x.n, size, self.new(x.n * size), self.node([x.node], lambda grad: [self.new(nbytes)]))

    def shaped(self, n: float, size: int, like_n: float, like_size: int) -> Buffer:
        """A gradient of ``n`` elements, summed and cast to those of an input."""
        found = self.new(n * size)
        if like_n < n:
            found = self.new(like_n * size)
        return found if like_size == size else self.new(like_n * like_size)

    def mul(self, x: Value, y: Value) -> Value:
        """``x * y``, the smaller broadcast."""
        n, size = max(x.n, y.n), max(x.size, y.size)
        x_n, x_size, y_n, y_size = x.n, x.size, y.n, y.size
        wants = (x.node is not None, y.node is not None)

        def rule(grad: Gradient) -> list[Gradient | None]:
            return [
                self.shaped(n, size, x_n, x_size) if wants[0] else None,
                self.shaped(n, size, y_n, y_size) if wants[1] else None,
            ]

        saved = (x.buffer if wants[1] else None, y.buffer if wants[0] else None)
        return Value(n, size, self.new(n * size), self.node([x.node, y.node], rule, *saved))

    def constant(self, x: Value, size: int | None = None) -> Value:
        """``x`` times something that needs no gradient and is there anyway (a number, a rotary table)."""
        result, like, n = max(x.size, size or 0), x.size, x.n
        return Value(
            n, result, self.new(n * result), self.node([x.node], lambda grad: [self.shaped(n, result, n, like)])
        )

    def scale(self, x: Value, features: int, *, size: int = 0) -> Value:
        """``weight * x`` with a weight of ``features`` elements, in ``size`` bytes each if that is more."""
        trained = self.arithmetic.full
        weight = self.arithmetic.weight
        n, size, like = x.n, max(x.size, weight, size), x.size

        def rule(grad: Gradient) -> list[Gradient | None]:
            if trained:
                whole = self.new(n * size)
                self.grow(features * weight)
                del whole
            return [self.shaped(n, size, n, like), None]

        # With a frozen weight only that weight is saved, which is there anyway.
        saved = x.buffer if trained else None
        # With a trained weight there is a graph even where the input needs no gradient.
        weighs = Node(self.ledger, [], lambda grad: [], ()) if self.graph and trained else None
        return Value(n, size, self.new(n * size), self.node([x.node, weighs], rule, saved))

    def add(self, x: Value, y: Value) -> Value:
        """``x + y`` of equal shapes."""
        n, size = x.n, max(x.size, y.size)
        sizes = (x.size, y.size)

        def rule(grad: Gradient) -> list[Gradient | None]:
            return [grad if own == size else self.new(n * own) for own in sizes]

        return Value(n, size, self.new(n * size), self.node([x.node, y.node], rule))

    def square(self, x: Value) -> Value:
        """``x.pow(2)``, whose backward makes ``x.pow(1)`` and twice that first."""
        return self.unary(x, save_input=True, temporaries=2)

    def mean(self, x: Value, features: int) -> Value:
        """Mean over the last axis; its backward divides an expanded gradient, into a whole tensor."""
        nbytes = x.nbytes
        n = x.n / features
        return Value(n, x.size, self.new(n * x.size), self.node([x.node], lambda grad: [self.new(nbytes)]))

    # -- matrix products

    def linear(self, x: Value, features: tuple[float, float], *, bias: bool = False, block: bool = True) -> Value:
        """``x @ W.t() + b`` with ``W`` of ``features = (in, out)``; adapted and quantised in blocks."""
        arithmetic = self.arithmetic
        base = self.plain_linear(x, features, trained=arithmetic.full, bias=bias, block=block)
        if arithmetic.adapter is None or not block:
            return base
        return adapted(self, x, base, features, arithmetic.adapter)

    def plain_linear(
        self,
        x: Value,
        features: tuple[float, float],
        *,
        trained: bool,
        bias: bool,
        block: bool,
        size: int | None = None,
    ) -> Value:
        arithmetic = self.arithmetic
        stored = arithmetic.weight if size is None else size
        compute = arithmetic.compute if size is None or arithmetic.autocast else size
        x = self.cast(x, compute) if arithmetic.autocast else x
        fan_in, fan_out = features
        weights = fan_in * fan_out
        rows = x.n / fan_in
        quantised = block and size is None and arithmetic.quantised != "none"
        expanded = self._weight_copy(weights, compute, quantised=quantised, cast=stored != compute)
        out = self._product(rows * fan_out * compute)
        if quantised:
            expanded = None
        in_bytes, wants = x.nbytes, x.node is not None
        weight = self._weight_node(weights, stored) if trained else None
        extra = (fan_out * stored) if trained and bias else 0

        def rule(grad: Gradient) -> list[Gradient | None]:
            again = self._weight_copy(weights, compute, quantised=quantised, cast=False)
            found = self.new(in_bytes) if wants else None
            made = self.new(weights * compute) if trained else None
            if extra:
                self.grow(extra)
            del again
            return [found, made]

        saved = (x.buffer if trained else None, expanded if wants else None)
        return Value(rows * fan_out, compute, out, self.node([x.node, weight], rule, *saved))

    def _weight_node(self, n: float, stored: int) -> Node | None:
        """Where the gradient of a weight arrives: at the parameter itself, or at its cast to the computing dtype."""
        if not self.graph:
            return None
        return Node(self.ledger, [], lambda grad: self._arrive(grad, n * stored), ())

    def _arrive(self, grad: Gradient, nbytes: float) -> list[Gradient | None]:
        if self.shared is not None:
            if not self.shared:
                self.shared.append(grad)
        elif self.arithmetic.autocast and nbytes > grad.nbytes:
            self.grow(nbytes)
        elif not self.ledger.accumulate:
            self.ledger.gradients.append(grad)
        return []

    def end_of_shared_weight(self, n: float) -> None:
        """The gradient that several products of one weight have added up arrives there."""
        waiting, self.shared = self.shared or [], None
        if waiting:
            self._arrive(waiting[0], n * self.arithmetic.weight)

    def _weight_copy(self, n: float, compute: int, *, quantised: bool, cast: bool) -> Buffer | None:
        if quantised:
            return self.new(n * compute)
        # Autocast keeps the cast weight for the whole step (and each recomputation makes another).
        return self.new(n * compute) if cast and self.arithmetic.autocast else None

    def shift(self, x: Value) -> Value:
        """``x + number``: a new tensor whose gradient is passed on."""
        return Value(x.n, x.size, self.new(x.nbytes), self.node([x.node], lambda grad: [grad]))

    def experts(self, x: Value, features: tuple[float, float], experts: int) -> Value:
        """A grouped matrix product: rows sorted by expert, one matrix for each. Autocast does not know it."""
        arithmetic = self.arithmetic
        trained, size = arithmetic.full, arithmetic.weight
        x = self.cast(x, size)
        fan_in, fan_out = features
        weights = experts * fan_in * fan_out
        out = self._product(x.n / fan_in * fan_out * size)
        nbytes = x.nbytes
        sink = self._weight_node(weights, size) if trained else None

        def rule(grad: Gradient) -> list[Gradient | None]:
            return [self.new(nbytes), self.new(weights * size) if trained else None]

        saved = x.buffer if trained else None
        return Value(x.n / fan_in * fan_out, size, out, self.node([x.node, sink], rule, saved))

    # -- attention

    def attention(self, q: Value, k: Value, v: Value, heads: float, groups: int) -> Value:
        """What FlashAttention-2 allocates: output and log-sum-exp; backward an FP32 dq, expanded dk and dv."""
        size = self.arithmetic.compute
        rows = q.n
        q, k, v = (self.cast(t, size) for t in (q, k, v))
        out = self._product(rows * size)
        statistics = self.new(heads * 4)
        q_bytes, kv_bytes = q.nbytes, k.nbytes
        grouped = groups > 1

        def rule(grad: Gradient) -> list[Gradient | None]:
            accumulator = self.new(rows * 4)
            sums = self.new(heads * 4)
            dq = self.new(q_bytes)
            expanded = [self.new(q_bytes), self.new(q_bytes)] if grouped else []
            dk, dv = self.new(kv_bytes), self.new(kv_bytes)
            expanded.clear()
            del accumulator, sums
            return [dq, dk, dv]

        saved = (q.buffer, k.buffer, v.buffer, out, statistics)
        return Value(rows, size, out, self.node([q.node, k.node, v.node], rule, *saved))

    def checkpoint(self, block: Callable[[Value], Value], x: Value, *, selective: bool) -> Value:
        """Run ``block`` keeping its input only (selective: and the outputs of its matrix products)."""
        kept: list[Buffer] | None = [] if selective else None
        out = self._quietly(block, x, kept)
        size, n, source, buffer = x.size, x.n, x.node, x.buffer

        def replay() -> tuple[Node, Node]:
            stop = Node(self.ledger, [], lambda grad: [], ())
            self.keep, self.replaying = kept, kept is not None
            again = block(Value(n, size, buffer, stop))
            self.keep, self.replaying = None, False
            assert again.node is not None
            return again.node, stop

        # The outputs kept are held by the list alone, so that each is freed when the replay has used it.
        node = Recompute(self.ledger, source, replay, (buffer,))
        return Value(out.n, out.size, out.buffer, node)

    def _quietly(self, block: Callable[[Value], Value], x: Value, kept: list[Buffer] | None) -> Value:
        self.graph, self.keep = False, kept
        try:
            return block(Value(x.n, x.size, x.buffer, None))
        finally:
            self.graph, self.keep = True, None

    def backward(self, top: Value, grad_bytes: float, stop: Node | None) -> Gradient | None:
        """Send a fresh gradient through the graph of ``top``."""
        assert top.node is not None
        node, top.node, top.buffer = top.node, None, None
        node.grad = self.new(grad_bytes)
        return run_backward(self.ledger, node, stop)
