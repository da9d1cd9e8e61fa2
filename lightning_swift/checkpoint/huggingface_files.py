"""The config and tokenizer files that travel with a Hugging Face model in ``huggingface/``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_swift.checkpoint.layout import HUGGINGFACE, Manifest, contained
from lightning_swift.errors import CheckpointCorruptError

__all__ = ["CONFIG", "copy_companions", "read_config", "write_config"]

CONFIG = "config.json"


def read_config(directory: Path, manifest: Manifest) -> dict[str, Any] | None:
    """The Hugging Face config in the checkpoint; None where the module holds no Hugging Face model.

    Raises:
        CheckpointCorruptError: It is missing or no JSON object.
    """
    if manifest.huggingface is None:
        return None
    path = contained(directory, f"{HUGGINGFACE}/{CONFIG}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"the model's config cannot be read ({error}).", where=str(path)) from error
    if not isinstance(config, dict):
        raise CheckpointCorruptError("the model's config is no JSON object.", where=str(path))
    return config


def write_config(folder: Path, config: Mapping[str, Any], *, dtype: str | None, untied: bool = False) -> None:
    """Write the config with the dtype of the weights: ``from_pretrained`` follows the config, not the file.

    Args:
        folder: Where to write it.
        config: As it lies in the checkpoint.
        dtype: Dtype of the weights, None to leave it alone.
        untied: Input and output embeddings have values of their own, so a loader must not tie them.
    """
    content = {key: value for key, value in config.items() if key != "torch_dtype"}
    if dtype is not None:
        content["dtype"] = dtype
    # Composite models repeat both settings in the config of each part.
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        if dtype is not None and isinstance(part.get("dtype"), str):
            part["dtype"] = dtype
        if untied and part.get("tie_word_embeddings"):
            part["tie_word_embeddings"] = False
    (folder / CONFIG).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_companions(folder: Path, checkpoint: Path, manifest: Manifest) -> None:
    """Copy the other files of ``huggingface/``: tokenizer, chat template, generation settings."""
    for name in manifest.files:
        parent, _, own = name.partition("/")
        if parent == HUGGINGFACE and own and own != CONFIG:
            shutil.copyfile(contained(checkpoint, name), folder / own)
