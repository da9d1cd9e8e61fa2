"""Generation on pipeline stages: Hugging Face's own loop, with the pipeline computing the whole sequence each time.

Stages keep no cache, so that a continuation costs about its length times as much as one with a cache: good for a look
at what a model says during training, not for serving it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from lightning_swift.parallel.stages import shallow_copy

__all__ = ["NextLogits", "generate"]

# From arguments of the model to logits of its last positions.
NextLogits = Callable[[dict[str, Any]], Tensor]


def generate(pretrained: Any, next_logits: NextLogits, args: tuple[Any, ...], kwargs: dict[str, Any], turn: int) -> Any:
    """Call ``pretrained.generate``, whose forward passes are ``next_logits``.

    Args:
        pretrained: The Hugging Face model of a stage; it is not changed.
        next_logits: Logits ``[rows, n, vocabulary]`` of the last ``n`` positions, equal on all ranks.
        args: Of ``generate``.
        kwargs: Of ``generate``.
        turn: Number of the call, so that sampling the same prompt again gives something else.
    """
    prompt = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    devices = [prompt.device] if prompt is not None and prompt.device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices):
        # Ranks that run one model must draw the same tokens, and have only the prompt in common.
        torch.manual_seed(turn + (0 if prompt is None else int(prompt.sum())))
        return _driven_by(pretrained, next_logits).generate(*args, **{**kwargs, "use_cache": False})


def _driven_by(pretrained: Any, next_logits: NextLogits) -> Any:
    """A shell of ``pretrained`` with another forward, which keeps the signature that ``generate`` looks at."""
    kind = type(pretrained)

    @functools.wraps(kind.forward)
    def forward(_: Any, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        arguments = {**({"input_ids": args[0]} if args else {}), **kwargs}
        return CausalLMOutputWithPast(logits=next_logits(arguments))

    shell = shallow_copy(pretrained)
    shell.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return shell
