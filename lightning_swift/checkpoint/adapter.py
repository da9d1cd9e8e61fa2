"""Writes the adapter of a checkpoint as peft itself would save it: streaming, without torch or peft."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from lightning_swift.checkpoint.distcp import read_index
from lightning_swift.checkpoint.huggingface_files import copy_companions
from lightning_swift.checkpoint.lora import only_adapter
from lightning_swift.checkpoint.output import fresh_folder
from lightning_swift.checkpoint.safe_load import hashing_meanwhile, verify
from lightning_swift.checkpoint.safetensors_writer import OutputTensor, write_weights
from lightning_swift.checkpoint.selection import WRAPPED, model_tensors, stored_weights, streaming
from lightning_swift.errors import ExportError

__all__ = ["ADAPTER_CONFIG", "write_adapter"]

ADAPTER_CONFIG = "adapter_config.json"


def write_adapter(checkpoint: Path, output: Path, *, verify_hashes: bool = False) -> tuple[str, ...]:
    """Write ``adapter_model.safetensors``, ``adapter_config.json`` and the tokenizer files to ``output``.

    Args:
        checkpoint: A checkpoint of a peft model with one adapter.
        output: Folder to make; must not exist, or be empty. It appears at once and whole, or not at all.
        verify_hashes: Compare the SHA-256 of every file of the checkpoint.

    Returns:
        Names of the adapter's tensors.

    Raises:
        CheckpointError: The checkpoint is not whole, or unsafe.
        ExportError: It holds no adapter, or several, or one that peft's format does not express by tensors alone.
    """
    manifest = verify(checkpoint, hashes=False)
    if manifest.adapters is None:
        raise ExportError("the checkpoint holds no adapter.", where=str(checkpoint), fix="Merge it instead.")
    adapter, config = only_adapter(manifest.adapters)
    if config.get("bias", "none") != "none":
        raise ExportError("an adapter with trained biases cannot be written.", where=adapter, fix="Merge it instead.")
    # The adapter itself is always in the checkpoint.
    stored = stored_weights(manifest, read_index(checkpoint), checkpoint, None)
    with fresh_folder(output) as folder, hashing_meanwhile(checkpoint, manifest, enabled=verify_hashes):
        tensors = [
            OutputTensor(own, tensor.dtype, tensor.shape, partial(streaming(checkpoint), tensor))
            for name, tensor in model_tensors(manifest, stored, None).items()
            if (own := _own_name(name, adapter)) is not None
        ]
        if not tensors:
            raise ExportError("the checkpoint holds no tensor of the adapter.", where=adapter)
        write_weights(folder, tensors, stem="adapter_model")
        content = {**config, "inference_mode": True}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        copy_companions(folder, checkpoint, manifest)
    return tuple(tensor.name for tensor in tensors)


def _own_name(name: str, adapter: str) -> str | None:
    """Peft's name in the file for the tensor ``name`` of the model, None for one of the base."""
    escaped = re.escape(adapter)
    if f".modules_to_save.{adapter}." in name:
        own = name.replace(f".modules_to_save.{adapter}.", ".")
    elif re.search(rf"\.lora_\w+\.{escaped}(\.|$)", name):
        own = re.sub(rf"\.{escaped}(\.weight|\.bias)?$", r"\1", name)
        # DoRA's magnitudes are a module in memory and a bare tensor in the file.
        own = own.removesuffix(".weight") if own.endswith("lora_magnitude_vector.weight") else own
    else:
        return None
    return WRAPPED + own
