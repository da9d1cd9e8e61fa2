"""Writes a model that is whole in this process's memory (one device, or DDP) as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_swift.checkpoint.export_reference import build_empty

__all__ = ["write_whole"]


def write_whole(
    model: Any,
    folder: Path,
    *,
    adapters: Mapping[str, Any] | None,
    adapter_only: bool,
    dtype: str | None,
    max_shard_size: str,
) -> None:
    """Write ``model`` with ``save_pretrained``; its own weights and adapters are left as they are.

    A copy is made in host memory, where adapters are merged and weights are cast.

    Args:
        model: A ``PreTrainedModel``, or the ``PeftModel`` around it.
        folder: Where to write.
        adapters: peft's configs by adapter name, or None.
        adapter_only: Write the adapter in peft's format instead of the model.
        dtype: Of the weights; None keeps theirs.
        max_shard_size: Most bytes of tensors in one file.
    """
    if adapter_only:
        model.save_pretrained(folder, safe_serialization=True)
        return
    own = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
    target = own if dtype is None else getattr(torch, dtype)
    config = model.config
    config.architectures = [type(_inner(model)).__name__]
    copy = build_empty(config, adapters, dtype=target if adapters is None else own)
    copy.load_state_dict(model.state_dict())
    if adapters is not None:
        copy = copy.merge_and_unload()
        for tensor in (*copy.parameters(), *copy.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(target)
        copy.config.dtype = target
    copy.generation_config = getattr(_inner(model), "generation_config", None)
    copy.save_pretrained(folder, max_shard_size=max_shard_size)


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
