"""What a model is compared by: its logits for fixed tokens, and the digest of every tensor."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_swift.errors import ExportError

__all__ = ["digests_of", "logits_of", "token_ids"]

# Enough positions to use every position-dependent part, few enough that the logits of a large vocabulary stay small.
_TOKENS = 64


def token_ids(config: Any) -> list[int]:
    """The fixed tokens that every model of this config is tried on; the last row of the embedding is among them.

    Raises:
        ExportError: The config has no vocabulary, so this is no language model.
    """
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ExportError(
            f"{type(config).__name__} has no vocabulary, so there are no tokens to compare logits on.",
            fix="Export it without verification (verify=False).",
        )
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (length,), generator=generator)
    ids[0], ids[-1] = vocabulary - 1, 0
    return [int(token) for token in ids]


def logits_of(model: nn.Module, ids: list[int], *, device: torch.device | str = "cpu") -> Tensor:
    """The model's answer to one sequence: float32 ``[tokens, vocabulary]`` on the CPU, in evaluation mode.

    A collective call for a sharded model. The training mode of each module is put back.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            output = model(**_inputs(model, ids, device))
    finally:
        for module, mode in modes:
            module.training = mode
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    return logits.detach().float().cpu().reshape(-1, logits.shape[-1])


def digests_of(model: nn.Module) -> dict[str, str]:
    """SHA-256 of shape and values of every tensor in the model's state dict.

    Floating-point values are hashed as float32, since transformers keeps a few tensors of some models in it whatever
    dtype it is asked for.
    """
    return {name: _digest(tensor) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _inputs(model: nn.Module, ids: list[int], device: torch.device | str) -> dict[str, Any]:
    tokens = torch.tensor([ids], device=device)
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    flat = flat.float() if flat.is_floating_point() else flat
    digest = hashlib.sha256(str(tuple(tensor.shape)).encode())
    digest.update(memoryview(cast(Any, flat.view(torch.uint8).numpy())))
    return digest.hexdigest()
