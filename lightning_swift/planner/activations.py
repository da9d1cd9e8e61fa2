"""One training step on the :mod:`tape`: what each layer keeps, and how high memory rises at each point of the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_swift.planner._arithmetic import Arithmetic
from lightning_swift.planner._ops import Ops
from lightning_swift.planner.layers import Part, decoder_layer, final_norm, gathered
from lightning_swift.planner.shape import ModelShape
from lightning_swift.planner.tape import Gradient, Ledger, Node, Value, run_backward

__all__ = ["Checkpointing", "Layer", "Loss", "Step", "StepOptions", "profile"]

Checkpointing = Literal["none", "selective", "full"]
Loss = Literal["huggingface", "huggingface_kept", "chunked"]


@dataclass(frozen=True)
class StepOptions:
    """What a micro-batch on one rank is made of.

    Args:
        arithmetic: Sizes of elements, adapters, quantisation.
        batch: Sequences.
        length: Tokens of each.
        checkpointing: What blocks keep.
        loss: ``"huggingface"``: logits, their FP32 copy, cross entropy; the output is dropped before the backward
            pass, as a LightningModule does that returns ``out.loss``. ``"huggingface_kept"``: the caller keeps the
            output. ``"chunked"``: head and loss for ``chunk`` tokens at a time, recomputed in the backward pass.
        chunk: Tokens of a chunk.
        tensor: Ranks that share heads, columns and (``vocab_parallel``) the head.
        sequence: They share rows between blocks too.
        loss_parallel: Logits stay cut over those ranks.
        accumulate: Parameters have gradients from an earlier micro-batch.
    """

    arithmetic: Arithmetic
    batch: int
    length: int
    checkpointing: Checkpointing = "none"
    loss: Loss = "huggingface"
    chunk: int = 1024
    tensor: int = 1
    sequence: bool = False
    loss_parallel: bool = False
    accumulate: bool = False


@dataclass(frozen=True)
class Layer:
    """What one layer does to memory, in bytes. Peaks are above the level at which the phase starts.

    Args:
        saved: Kept for the backward pass.
        forward: Peak of the forward pass.
        backward: Peak of the backward pass, gradients of the layer's parameters included.
        gradients: Those gradients.
    """

    saved: float
    forward: float
    backward: float
    gradients: float


@dataclass(frozen=True)
class Step:
    """What a step does to memory, in bytes above the level of weights and states.

    Args:
        entered: Batch, rotary tables and the embedding's output.
        layers: By kind: dense (False), sparse (True).
        first: The first layer, where it differs: nothing below it wants a gradient.
        loss: Peak from the last layer's output to its gradient, above the level before.
        loss_logits: The part of that peak that logits and loss take.
        loss_forward: Peak of the forward part of it.
        cast: Copies of one layer's weights, by kind, that autocast keeps to the end of the forward pass where the
            graph does not (and counts as saved).
        kept: Logits that stay until the backward pass is over, because the caller holds them.
        head_gradients: Gradients of head and last norm.
        embedding: Peak of the embedding's backward above the level before, its gradient included.
        embedding_gradient: That gradient.
        waiting: The head's gradient, until the embedding's comes, where both are one weight.
        boundary: One activation between layers.
    """

    entered: float
    layers: dict[bool, Layer]
    first: Layer
    loss: float
    loss_logits: float
    loss_forward: float
    cast: dict[bool, float]
    kept: float
    head_gradients: float
    embedding: float
    embedding_gradient: float
    waiting: float
    boundary: float


@lru_cache(maxsize=4096)
def profile(shape: ModelShape, options: StepOptions) -> Step:
    """Walk one layer of each kind, the loss and the embedding."""
    walk = _Walk(shape, options)
    arithmetic = options.arithmetic
    layers = {sparse: walk.layer(sparse=sparse) for sparse in dict.fromkeys(shape.sparse)}
    # A frozen embedding wants none, but checkpointed blocks need a gradient at their input all the same.
    flows = arithmetic.full or options.checkpointing != "none"
    kind = shape.sparse[0]
    gradient = shape.embedding * arithmetic.weight if arithmetic.full else 0
    # The gradients of head and embedding are added into a third tensor; with one there already, the head's waits.
    # (Cut over ranks, the embedding's is made whole all the same, and a part of it is taken.)
    doubled = gradient * (2 if options.accumulate else 1) / options.tensor if shape.tied else 0
    scaled = walk.boundary if shape.family.scaled_embedding else 0
    return Step(
        entered=walk.entered(),
        layers=layers,
        first=layers[kind] if flows else walk.layer(sparse=kind, flows=False),
        **walk.loss(),
        cast={sparse: walk.cast(sparse=sparse) for sparse in layers},
        embedding=gradient + doubled + (scaled if arithmetic.full else 0),
        embedding_gradient=0 if shape.tied else gradient,
        waiting=gradient if shape.tied and options.accumulate else 0,
        boundary=walk.boundary,
    )


class _Walk:
    """One tape after another, all with the same micro-batch."""

    def __init__(self, shape: ModelShape, options: StepOptions) -> None:
        self.shape, self.options = shape, options
        self.tokens = options.batch * options.length
        arithmetic = options.arithmetic
        self.size = arithmetic.stream or arithmetic.weight
        self.rows = self.part(sparse=False).rows
        self.forward_peak = 0
        self.boundary = self.rows * shape.hidden * self.size

    def part(self, *, sparse: bool) -> Part:
        return Part(self.shape, sparse, self.tokens, self.options.tensor, self.options.sequence)

    def entered(self) -> float:
        """Ids and labels (int64), cosine and sine for each position, the embedding's output."""
        rotary = 2 * self.options.length * self.shape.head_dim * self.size if self.shape.family.rotary else 0
        return 3 * 8 * self.tokens + rotary + self.boundary

    def _start(self) -> tuple[Ops, Value, Node]:
        ops = Ops(Ledger(accumulate=self.options.accumulate), self.options.arithmetic)
        stop = Node(ops.ledger, [], lambda grad: [], ())
        return ops, Value(self.rows * self.shape.hidden, self.size, ops.new(self.boundary), stop), stop

    def layer(self, *, sparse: bool, flows: bool = True) -> Layer:
        ops, hidden, stop = self._start()
        if not flows:
            hidden.node = None
        ledger, part = ops.ledger, self.part(sparse=sparse)
        before = ledger.current
        ledger.restart_peak()
        inputs = [hidden]
        del hidden
        if self.options.checkpointing == "none":
            out = decoder_layer(ops, part, inputs.pop())
        else:
            selective = self.options.checkpointing == "selective"
            out = ops.checkpoint(lambda x: decoder_layer(ops, part, x), inputs.pop(), selective=selective)
        forward, saved = ledger.peak - before, ledger.current - before
        ledger.restart_peak()
        level = ledger.current
        arrived = ops.backward(out, self.boundary, stop)
        gradients = sum(grad.nbytes for grad in ledger.gradients)
        del arrived
        return Layer(saved, forward, ledger.peak - level, gradients)

    def cast(self, *, sparse: bool) -> float:
        arithmetic, shape = self.options.arithmetic, self.shape
        copied = arithmetic.autocast and arithmetic.weight > arithmetic.compute
        if not copied or self.options.checkpointing == "none":
            return 0.0
        return (shape.attention_linear + shape.mlp_linear(sparse)) * arithmetic.compute

    def loss(self) -> dict[str, float]:
        ops, hidden, stop = self._start()
        ledger = ops.ledger
        before = ledger.current
        ledger.restart_peak()
        inputs = [hidden]
        del hidden
        held: list[Value] = []
        if self.options.loss == "chunked":
            arrived = self._chunks(ops, inputs, stop)
        else:
            arrived = self._whole(ops, inputs, stop, held)
        kept = sum(value.buffer.nbytes for value in held if value.buffer is not None)
        outcome: dict[str, float] = {
            "loss": ledger.peak - before,
            "loss_forward": self.forward_peak - before,
            "loss_logits": ledger.loss_at_peak,
            "kept": kept,
            "head_gradients": sum(grad.nbytes for grad in ledger.gradients),
        }
        del arrived
        return outcome

    def _normed(self, ops: Ops, inputs: list[Value]) -> Value:
        part = self.part(sparse=False)
        hidden = final_norm(ops, part, inputs.pop())
        return hidden if not self.options.sequence else gathered(ops, part, hidden)

    def _whole(self, ops: Ops, inputs: list[Value], stop: Node, held: list[Value]) -> Gradient | None:
        hidden = self._normed(ops, inputs)
        top, logits = self._cross_entropy(ops, hidden, self.tokens)
        if self.options.loss == "huggingface_kept":
            held.append(logits)
        del logits, hidden
        return self._run(ops, top, stop)

    def _run(self, ops: Ops, top: Value, stop: Node) -> Gradient | None:
        node, top.node = top.node, None
        del top
        assert node is not None
        self.forward_peak = self.forward_peak or ops.ledger.peak
        node.grad = ops.new(4)
        return run_backward(ops.ledger, node, stop)

    def _cross_entropy(self, ops: Ops, hidden: Value, rows: int) -> tuple[Value, Value]:
        """Head, FP32 copy, log-softmax, mean of the losses."""
        options, shape = self.options, self.shape
        vocab = shape.vocab / (options.tensor if options.loss_parallel else 1)
        ops.is_loss = True
        local = shape.vocab / options.tensor
        logits = ops.linear(hidden, (shape.hidden, local), block=False)
        if vocab != local:
            logits = _collected(ops, logits, rows * vocab)
        if shape.family.softcap:
            logits = ops.constant(ops.unary(ops.constant(logits), save_output=True))
        scores = ops.cast(logits, 4)
        # Where they are FP32 already, the copy is the logits themselves.
        cut = options.loss_parallel and options.tensor > 1
        probabilities = _cut_softmax(ops, scores) if cut else ops.unary(scores, save_output=True)
        nbytes = probabilities.nbytes
        top = Value(1, 4, ops.new(4), ops.node([probabilities.node], lambda grad: [ops.new(nbytes)], ops.new(rows * 8)))
        del probabilities, scores
        ops.is_loss = False
        return top, logits

    def _chunks(self, ops: Ops, inputs: list[Value], stop: Node) -> Gradient | None:
        """Head and loss for some rows at a time; the gradients of the rows come together in one tensor."""
        hidden = self._normed(ops, inputs)
        rows = min(self.options.chunk, self.tokens)
        n, size = hidden.n, hidden.size
        buffer, node = hidden.buffer, hidden.node
        assert node is not None
        del hidden
        ops.shared = []
        for _ in range(min(2, -(-self.tokens // rows))):
            piece = Node(ops.ledger, [], lambda grad: [], ())
            top, _logits = self._cross_entropy(ops, Value(rows * self.shape.hidden, size, buffer, piece), rows)
            del _logits
            part = self._run(ops, top, piece)
            # The slice's gradient is a whole tensor of zeros with one part filled in.
            node.receive(ops.ledger, ops.new(n * size))
            del part, top
        del buffer
        ops.end_of_shared_weight(self.shape.embedding / self.options.tensor)
        return run_backward(ops.ledger, node, stop)


def _cut_softmax(ops: Ops, x: Value) -> Value:
    """Of logits that stay cut: the loss's backward pass gives its gradient at once."""
    out = ops.new(x.nbytes)
    return Value(x.n, x.size, out, ops.node([x.node], lambda grad: [grad], out))


def _collected(ops: Ops, x: Value, n: float) -> Value:
    nbytes = x.nbytes
    return Value(n, x.size, ops.new(n * x.size), ops.node([x.node], lambda grad: [ops.new(nbytes)]))
