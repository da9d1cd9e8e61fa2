"""Which tensors of a checkpoint make up the model, and under which names the outside world knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_swift.checkpoint.distcp import CheckpointIndex, TensorEntry
from lightning_swift.checkpoint.layout import MODEL_PREFIX, Manifest
from lightning_swift.errors import CheckpointCorruptError, ExportError

__all__ = ["WRAPPED", "is_untied", "model_tensors"]


WRAPPED = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


def model_tensors(
    manifest: Manifest, index: CheckpointIndex, config: Mapping[str, Any] | None
) -> dict[str, TensorEntry]:
    """The tensors of the Hugging Face model by its own names; of the whole LightningModule where there is none.

    A tied name whose tensor is stored under another name of the model is left out, as ``save_pretrained`` does; it is
    there if the config says that nothing is tied, if the stored name lies outside the model, or if an adapter changes
    one of the two.

    Args:
        manifest: Of the checkpoint.
        index: Of the checkpoint.
        config: The Hugging Face config, None where there is no Hugging Face model.

    Raises:
        ExportError: The checkpoint holds no tensor of the model.
    """
    stored = {
        key.removeprefix(MODEL_PREFIX): tensor for key, tensor in index.tensors.items() if key.startswith(MODEL_PREFIX)
    }
    kept = {name: tensor for name, tensor in stored.items() if name not in manifest.tied}
    tied = _declares_tie(config)
    inside = _Inside(manifest)
    selected = {inner: tensor for name, tensor in kept.items() if (inner := inside(name)) is not None}
    for alias, canonical in manifest.tied.items():
        inner = inside(alias)
        if inner is None or (tied and inside(canonical) is not None and not _parted(alias, canonical)):
            continue
        if canonical not in kept:
            raise CheckpointCorruptError(f"{alias} is tied to {canonical}, which is not stored.", where="manifest.json")
        selected[inner] = kept[canonical]
    if not selected:
        model = "the module" if manifest.huggingface is None else f"the Hugging Face model {manifest.huggingface!r}"
        raise ExportError(f"the checkpoint holds no weights of {model}.", where="manifest.json")
    return selected


def is_untied(manifest: Manifest) -> bool:
    """Whether an adapter gives two names that share one frozen tensor different values once it is merged."""
    return any(_parted(alias, canonical) for alias, canonical in manifest.tied.items())


def _parted(alias: str, canonical: str) -> bool:
    return any(part in name for name in (alias, canonical) for part in (".base_layer.", ".original_module."))


def _declares_tie(config: Mapping[str, Any] | None) -> bool:
    """False only where the config says so: then a loader would not restore the tied name by itself."""
    if config is None:
        return True
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    flags = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return any(flags) or not flags


class _Inside:
    """Maps a name in the LightningModule to the name inside the Hugging Face model, None for one outside it."""

    def __init__(self, manifest: Manifest) -> None:
        self.prefix = f"{manifest.huggingface}." if manifest.huggingface else ""
        self.wrapped = manifest.adapters is not None

    def __call__(self, name: str) -> str | None:
        if not name.startswith(self.prefix):
            return None
        inner = name.removeprefix(self.prefix)
        return inner.removeprefix(WRAPPED) if self.wrapped else inner
