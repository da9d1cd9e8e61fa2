"""The trained model rebuilt from a checkpoint by torch.distributed.checkpoint: the other side of an export's check.

Shares no code with the merge beyond the manifest: the model class is built from its config and every tensor is read by
torch's own loader into the place its name gives it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_swift.checkpoint.export_frozen import FrozenParts
from lightning_swift.checkpoint.layout import HUGGINGFACE, MODEL_PREFIX, Manifest
from lightning_swift.checkpoint.sharded import load_into, read_index
from lightning_swift.errors import ExportError

__all__ = ["build_empty", "build_reference", "common_dtype"]


def build_reference(checkpoint: Path, manifest: Manifest, *, dtype: torch.dtype, base: Path | None = None) -> Any:
    """The Hugging Face model of ``checkpoint`` (inside a PeftModel if it has adapters) on the CPU, in ``dtype``.

    Quantised weights are the matrices that they stand for.

    Args:
        checkpoint: The directory.
        manifest: Its manifest.
        dtype: Of the weights.
        base: The verified pretrained folder, if the manifest names one.

    Raises:
        CheckpointMismatchError: Tensors are missing or have other shapes.
        ExportError: The model class cannot be built.
    """
    from transformers import AutoConfig

    folder = checkpoint / HUGGINGFACE
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = build_empty(config, manifest.adapters, dtype=dtype)
    prefix = f"{MODEL_PREFIX}{manifest.huggingface}."
    state = {
        f"{prefix}{name}": tensor
        for name, tensor in model.state_dict().items()
        if f"{prefix}{name}".removeprefix(MODEL_PREFIX) not in manifest.tied
    }
    frozen = FrozenParts(manifest, state, read_index(checkpoint))
    load_into(checkpoint, state, strict=True, ignore=lambda name: not name.startswith(prefix))
    frozen.fill(state, base)
    _fill_aliases(model.state_dict(), state, manifest, prefix)
    return model.eval()


def common_dtype(manifest: Manifest) -> torch.dtype:
    """The dtype of the checkpoint's weights; float32, which holds them all exactly, if there are several."""
    prefix = f"{MODEL_PREFIX}{manifest.huggingface}."
    found = {record.dtype for name, record in manifest.tensors.items() if name.startswith(prefix)}
    found |= set() if manifest.base is None else {tensor.dtype for tensor in manifest.base.tensors.values()}
    dtypes = {dtype for name in found if (dtype := getattr(torch, name)).is_floating_point}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def build_empty(config: Any, adapters: Mapping[str, Any] | None, *, dtype: torch.dtype) -> Any:
    """A model of ``config`` on the CPU whose weights have no meaning yet, inside a PeftModel if there are adapters.

    Args:
        config: A config of transformers; its ``architectures`` name the class.
        adapters: peft's configs by adapter name, or None.
        dtype: Of the weights.

    Raises:
        ExportError: transformers has no such class.
    """
    import transformers
    from transformers.initialization import no_init_weights

    names = getattr(config, "architectures", None) or []
    kind: Any = getattr(transformers, names[0] if names else "", None)
    if kind is None:
        raise ExportError(
            f"transformers has no model class {names[0] if names else 'for this config'!r}.",
            where=f"{type(config).__name__}.architectures",
            fix="Export without verification (verify=False).",
        )
    # Building may write into the config, and the caller's may be that of a live model.
    with no_init_weights():
        model = kind._from_config(copy.deepcopy(config), dtype=dtype)
    return model if adapters is None else _with_adapters(model, adapters)


def _with_adapters(model: Any, adapters: Mapping[str, Any]) -> Any:
    from dataclasses import fields

    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    for number, (name, content) in enumerate(adapters.items()):
        kind = PEFT_TYPE_TO_CONFIG_MAPPING[content["peft_type"]]
        known = {field.name for field in fields(kind)}
        options = {key: value for key, value in content.items() if key in known}
        # peft warns when the model it wraps was not loaded from this folder, as here.
        config = kind(**{**options, "base_model_name_or_path": None})
        if number:
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False)
    return model


def _fill_aliases(own: Mapping[str, Tensor], state: Mapping[str, Tensor], manifest: Manifest, prefix: str) -> None:
    # Where the model ties the two this copies a tensor onto itself; where it does not the alias has no other source.
    for alias, canonical in manifest.tied.items():
        target, source = own.get(f"{MODEL_PREFIX}{alias}".removeprefix(prefix)), state.get(f"{MODEL_PREFIX}{canonical}")
        if target is not None and source is not None:
            target.copy_(source)
