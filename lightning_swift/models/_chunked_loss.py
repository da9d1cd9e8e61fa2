"""Head and loss of a causal language model for some tokens at a time, so that its logits never exist as a whole.

torch's ``linear_cross_entropy`` does this for a plain matrix, and in BF16 rounds the loss to BF16. Here the model's own
forward does it, with whatever it has between its decoder and its loss: caps and scales of the logits, adapters at the
head, weights that a strategy gathers. Each chunk is computed again in the backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.models._token_loss import IGNORED

__all__ = ["compute_loss_in_chunks"]


def compute_loss_in_chunks(model: Any, chunk: int) -> None:
    """Have ``model`` compute its loss for ``chunk`` tokens at a time whenever it is called with labels.

    Its output then has no logits; without labels it is called as ever. Gradients of the head's weight are summed over
    chunks in the type in which autograd sees that weight.

    Args:
        model: A causal language model of transformers, without wrappers; what strategies do to it later is respected.
        chunk: Tokens of a chunk.

    Raises:
        ConfigurationError: Its loss is not that of its logits alone.
    """
    model.forward = _ChunkedForward(model, chunk)


class _ChunkedForward:
    """What a model has in place of its class's ``forward``.

    The head is called once for all chunks, so that a strategy gathers its weight and reduces its gradient once.
    """

    def __init__(self, model: Any, chunk: int) -> None:
        self._model, self._chunk = model, chunk
        self._decoder = _name_of(model, model.get_decoder())
        self._head = _name_of(model, model.get_output_embeddings())
        _check_loss(model, self._head)

    @property
    def __signature__(self) -> inspect.Signature:
        # Generation looks up what it may pass.
        return inspect.signature(self._own)

    @property
    def _own(self) -> Callable[..., Any]:
        return MethodType(type(self._model).forward, self._model)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        labels = inputs.get("labels")
        if labels is None:
            return self._own(*args, **inputs)
        del inputs["labels"]
        items = inputs.pop("num_items_in_batch", None)
        targets = pad(labels, (0, 1), value=IGNORED)[:, 1:]
        output, decoded = self._as_far_as_the_head(args, inputs)
        head = self._model.get_submodule(self._head)
        # A strategy's hooks are around the call of the head; the chunks are inside it.
        with _in_place_of(head, "forward", partial(self._sum, head.forward, type(decoded), targets)):
            total = head(decoded.last_hidden_state)
        loss = total / ((targets != IGNORED).sum() if items is None else items)
        return type(output)(**{**output, "loss": loss, "logits": None})

    def _as_far_as_the_head(self, args: Any, inputs: Any) -> tuple[Any, Any]:
        """What the model returns without loss and logits, and what its decoder has returned."""
        decoder, decoded = self._model.get_submodule(self._decoder), []

        def decode(*args: Any, **kwargs: Any) -> Any:
            decoded.append(decoder(*args, **kwargs))
            return decoded[-1]

        with self._part(self._decoder, decode), self._part(self._head, lambda x: x.new_empty((*x.shape[:-1], 0))):
            output = self._own(*args, **inputs)
        if len(decoded) != 1 or not hasattr(decoded[0], "last_hidden_state"):
            raise self._refusal(f"its forward does not call {self._decoder} once")
        return output, decoded[0]

    def _sum(self, head: Callable[..., Any], decoded: type[Any], targets: Tensor, hidden: Tensor) -> Tensor:
        """Summed loss of all tokens from the decoder's output (``[batch, length, width]``)."""
        rows, wanted = hidden.flatten(0, 1).split(self._chunk), targets.flatten().split(self._chunk)
        total = hidden.new_zeros((), dtype=torch.float32)
        for some, labels in zip(rows, wanted, strict=True):
            piece = checkpoint(self._piece, head, decoded, some[None], labels[None], use_reentrant=False)
            total = total + piece
        return total

    def _piece(self, head: Callable[..., Any], decoded: type[Any], hidden: Tensor, targets: Tensor) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        losses: list[Tensor] = []

        def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
            one = torch.ones((), device=logits.device)
            losses.append(ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch=one, shift_labels=targets))
            return losses[-1]

        output = decoded(last_hidden_state=hidden)
        with (
            self._part(self._decoder, lambda *_, **__: output),
            self._part(self._head, head),
            _in_place_of(self._model, "_loss_function", loss),
        ):
            # Of the inputs the decoder has made use already.
            self._own(input_ids=torch.zeros_like(targets), labels=targets, use_cache=False)
        if len(losses) != 1:
            raise self._refusal("its forward computes the loss by itself")
        return losses[0]

    @contextmanager
    def _part(self, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
        """While active, the model calls ``stand_in`` for its module of that name, which stays registered."""
        parent, _, child = name.rpartition(".")
        with _in_place_of(self._model.get_submodule(parent), child, stand_in):
            yield

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"{type(self._model).__name__} cannot compute its loss in chunks: {reason}.",
            where="loss='chunked'",
            fix="Use loss='huggingface'.",
        )


@contextmanager
def _in_place_of(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """While active, ``module.name`` is ``value``: an entry of its own dictionary, which is looked at first."""
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _name_of(model: nn.Module, part: object) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is part and name]
    if not names:
        raise ModelError(
            f"{type(model).__name__} does not say which of its modules are its decoder and its head.",
            where="loss='chunked'",
            fix="Use loss='huggingface'.",
        )
    return names[0]


def _check_loss(model: Any, head: str) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model.config, "output_router_logits", False):
        raise ConfigurationError(
            "the balancing loss of routers (output_router_logits) is not computed in chunks.",
            where="loss='chunked'",
            fix="Use loss='huggingface', or config_overrides={'output_router_logits': false}.",
        )
    if model.loss_function is not ForCausalLMLoss:
        raise ConfigurationError(
            f"the loss of {type(model).__name__} is not the cross entropy of the logits of {head}.",
            where="loss='chunked'",
            fix="Use loss='huggingface'.",
        )
