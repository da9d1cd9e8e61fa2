"""A shadow of autograd that moves no numbers: values have sizes only, and live as long as PyTorch's tensors would.

The closed form walks the operators of one layer on it (a few hundred of them, under a millisecond) and multiplies.
Storage is counted by Python's own reference counts, so a local variable of the layer code in ``layers.py`` keeps its
value alive exactly as long as the same variable in transformers keeps a tensor.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable

__all__ = ["Buffer", "Gradient", "Ledger", "Node", "Recompute", "Value", "run_backward"]

# The CUDA caching allocator hands out multiples of this many bytes.
_ROUND = 512
# References to a buffer that only the engine itself holds while it adds two gradients.
_OWN_REFERENCES = 3


class Ledger:
    """Bytes in use now, at the peak so far, and in gradients of parameters.

    Args:
        accumulate: Parameters have gradients already (a later micro-batch), so that new ones are added and freed.
    """

    __slots__ = ("accumulate", "current", "gradients", "loss", "loss_at_peak", "order", "peak")

    def __init__(self, *, accumulate: bool = False) -> None:
        self.current = 0
        self.peak = 0
        self.order = 0
        # Gradients that parameters keep: the caller decides what becomes of them after each layer.
        self.gradients: list[Buffer] = []
        self.accumulate = accumulate
        # Bytes of what belongs to the loss, and how many of them were alive at the peak.
        self.loss = 0
        self.loss_at_peak = 0

    def restart_peak(self) -> None:
        """Forget the peak: the next one is searched from here."""
        self.peak = self.current
        self.loss_at_peak = self.loss


class Buffer:
    """Storage of one tensor; freed with its last reference."""

    __slots__ = ("is_loss", "ledger", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: float, *, is_loss: bool = False) -> None:
        self.ledger = ledger
        self.nbytes = -(-int(nbytes) // _ROUND) * _ROUND
        self.is_loss = is_loss
        ledger.current += self.nbytes
        if is_loss:
            ledger.loss += self.nbytes
        if ledger.current > ledger.peak:
            ledger.peak = ledger.current
            ledger.loss_at_peak = ledger.loss

    def __del__(self) -> None:
        self.ledger.current -= self.nbytes
        if self.is_loss:
            self.ledger.loss -= self.nbytes


Gradient = Buffer
Rule = Callable[[Gradient], list[Gradient | None]]


class Node:
    """An operator that the backward pass will run.

    Args:
        inputs: For each input the node that made it, or None where no gradient is wanted.
        rule: Allocates as the operator's backward does; returns one gradient per input.
        saved: What the operator keeps alive until it has run.
    """

    __slots__ = ("grad", "inputs", "order", "rule", "saved")

    def __init__(self, ledger: Ledger, inputs: list[Node | None], rule: Rule, saved: tuple[Buffer | None, ...]) -> None:
        ledger.order += 1
        self.order = ledger.order
        self.inputs = inputs
        self.rule: Rule | None = rule
        self.saved = saved
        self.grad: Gradient | None = None

    def receive(self, ledger: Ledger, grad: Gradient) -> None:
        """Add a gradient, in place where nobody else holds the one that is there."""
        if self.grad is None:
            self.grad = grad
            return
        held = self.grad
        if sys.getrefcount(held) <= _OWN_REFERENCES:
            return
        self.grad = Buffer(ledger, held.nbytes, is_loss=held.is_loss)

    def __lt__(self, other: Node) -> bool:
        return self.order > other.order


class Recompute(Node):
    """A checkpointed block: its backward first runs the block again, with a graph.

    Args:
        replay: Runs it; returns the last node of its graph and the node that stands for its input.
    """

    __slots__ = ("replay",)

    def __init__(
        self,
        ledger: Ledger,
        source: Node | None,
        replay: Callable[[], tuple[Node, Node]],
        saved: tuple[Buffer | None, ...],
    ) -> None:
        super().__init__(ledger, [source], lambda grad: [grad], saved)
        self.replay: Callable[[], tuple[Node, Node]] | None = replay


class Value:
    """A tensor: elements, bytes per element, storage, and the node that made it.

    Args:
        n: Elements.
        size: Bytes per element.
        buffer: Storage, None for what is counted elsewhere (a parameter).
        node: Its maker in the graph, None if no gradient flows to it.
    """

    __slots__ = ("buffer", "n", "node", "size")

    def __init__(self, n: float, size: int, buffer: Buffer | None, node: Node | None) -> None:
        self.n = n
        self.size = size
        self.buffer = buffer
        self.node = node

    @property
    def nbytes(self) -> float:
        """Its bytes, unrounded."""
        return self.n * self.size


def run_backward(ledger: Ledger, top: Node, stop: Node | None = None) -> Gradient | None:
    """Run the graph behind ``top``, whose gradient has arrived, newest operators first.

    Returns:
        The gradient that arrives at ``stop``.
    """
    queue = [top]
    queued = {top.order}
    while queue:
        current = heapq.heappop(queue)
        if current is stop:
            arrived, current.grad = current.grad, None
            return arrived
        found = _replay(ledger, current) if isinstance(current, Recompute) else _apply(current)
        for target in current.inputs:
            passed = found.pop(0)
            if target is not None and passed is not None:
                target.receive(ledger, passed)
                if target.order not in queued:
                    queued.add(target.order)
                    heapq.heappush(queue, target)
            passed = None
    return None


def _apply(node: Node) -> list[Gradient | None]:
    rule, grad = node.rule, node.grad
    assert rule is not None
    assert grad is not None
    node.grad = None
    found = rule(grad)
    # Autograd frees what a node saved when the node is done, and passes its gradients on after that.
    node.rule, node.saved = None, ()
    return found


def _replay(ledger: Ledger, node: Recompute) -> list[Gradient | None]:
    assert node.replay is not None
    top, stop = node.replay()
    # Moved, so that the block's own backward can free it.
    top.grad, node.grad = node.grad, None
    arrived = run_backward(ledger, top, stop)
    node.replay, node.saved = None, ()
    return [arrived]
