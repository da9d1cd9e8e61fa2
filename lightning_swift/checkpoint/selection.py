"""Which tensors of a checkpoint make up the model, and under which names the outside world knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_swift.checkpoint.base import BaseEntry, base_entries
from lightning_swift.checkpoint.distcp import CheckpointIndex, TensorEntry
from lightning_swift.checkpoint.dtypes import Block
from lightning_swift.checkpoint.layout import MODEL_PREFIX, Manifest
from lightning_swift.checkpoint.stream import stream_tensor
from lightning_swift.errors import CheckpointCorruptError, ExportError

if TYPE_CHECKING:
    from lightning_swift.checkpoint.quantised import DequantisedEntry

__all__ = ["WRAPPED", "Weight", "is_untied", "model_tensors", "stored_weights", "streaming"]

Weight: TypeAlias = "TensorEntry | BaseEntry | DequantisedEntry"
"""A tensor of the checkpoint, of the pretrained folder beneath it, or a quantised one as its matrix."""

WRAPPED = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


def stored_weights(
    manifest: Manifest, index: CheckpointIndex, checkpoint: Path, base: Path | None
) -> dict[str, Weight]:
    """Every tensor of the LightningModule by its name there, none of them packed.

    Args:
        manifest: Of the checkpoint.
        index: Of the checkpoint.
        checkpoint: The directory.
        base: The verified pretrained folder, if the manifest names one.
    """
    weights: dict[str, TensorEntry | BaseEntry] = {
        key.removeprefix(MODEL_PREFIX): tensor for key, tensor in index.tensors.items() if key.startswith(MODEL_PREFIX)
    }
    if manifest.base is not None and base is not None:
        weights |= base_entries(manifest.base, base)
    if manifest.quantization is None:
        return {**weights}
    from lightning_swift.checkpoint.quantised import dequantised

    return dequantised(weights, manifest.quantization, checkpoint)


def streaming(checkpoint: Path) -> Callable[[Weight], Iterable[Block]]:
    """How to read any weight of ``checkpoint`` block by block."""

    def stream(weight: Weight) -> Iterable[Block]:
        return stream_tensor(checkpoint, weight) if isinstance(weight, TensorEntry) else weight.stream()

    return stream


def model_tensors(
    manifest: Manifest, stored: Mapping[str, Weight], config: Mapping[str, Any] | None
) -> dict[str, Weight]:
    """The tensors of the Hugging Face model by its own names; of the whole LightningModule where there is none.

    A tied name whose tensor is stored under another name of the model is left out, as ``save_pretrained`` does; it is
    there if the config says that nothing is tied, if the stored name lies outside the model, or if an adapter changes
    one of the two.

    Args:
        manifest: Of the checkpoint.
        stored: From :func:`stored_weights`.
        config: The Hugging Face config, None where there is no Hugging Face model.

    Raises:
        ExportError: The checkpoint holds no tensor of the model.
    """
    kept = {name: tensor for name, tensor in stored.items() if name not in manifest.tied}
    tied = _declares_tie(config)
    inside = _Inside(manifest)
    selected = {inner: tensor for name, tensor in kept.items() if (inner := inside(name)) is not None}
    for alias, canonical in manifest.tied.items():
        inner = inside(alias)
        if inner is None or (tied and inside(canonical) is not None and not _parted(alias, canonical)):
            continue
        if canonical not in kept and manifest.base is not None and canonical in manifest.base.tensors:
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
