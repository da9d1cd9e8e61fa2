"""Turns a sharded checkpoint into a Hugging Face folder: streaming, without torch, in a few dozen megabytes of memory.

Every byte written is read once from a ``.distcp`` file and checked on the way against the CRC-32 in its archive; all
other files are checked against their SHA-256. Comparing the SHA-256 of the ``.distcp`` files too takes twice the
processor time and is an option: other threads read the files meanwhile, and the folder appears only if they agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from lightning_swift.checkpoint.base import verified_base
from lightning_swift.checkpoint.distcp import read_index
from lightning_swift.checkpoint.dtypes import FLOATS, Block
from lightning_swift.checkpoint.experts import with_expert_names
from lightning_swift.checkpoint.faults import faultpoint
from lightning_swift.checkpoint.huggingface_files import copy_companions, read_config, write_config
from lightning_swift.checkpoint.layout import Manifest
from lightning_swift.checkpoint.output import POINT_BEFORE_COMMIT, fresh_folder
from lightning_swift.checkpoint.safe_load import hashing_meanwhile, verify
from lightning_swift.checkpoint.safetensors_writer import OutputTensor, parse_size, write_weights
from lightning_swift.checkpoint.selection import Weight, is_untied, model_tensors, stored_weights, streaming
from lightning_swift.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_swift.checkpoint.lora import AdaptedWeight

__all__ = ["FAULTPOINTS", "POINT_BEFORE_CONFIG", "POINT_TENSOR", "MergeDType", "MergeReport", "merge_checkpoint"]

MergeDType = Literal["float32", "bfloat16", "float16"]

POINT_TENSOR = "merge-tensor"
POINT_BEFORE_CONFIG = "merge-before-config"
FAULTPOINTS = (POINT_TENSOR, POINT_BEFORE_CONFIG, POINT_BEFORE_COMMIT)
"""Every point of a merge where a test may strike, in order."""


@dataclass(frozen=True)
class MergeReport:
    """What a merge has written.

    Args:
        output: The folder.
        files: Names of the weight files (and their index).
        tensors: Number of tensors.
        parameters: Number of elements.
        nbytes: Bytes of tensor data.
        dtype: Dtype of most of the floating-point bytes; None if there are none.
        adapter: Name of the adapter that was merged into the weights, or None.
        hashes_verified: Whether the SHA-256 of every file of the checkpoint was compared.
    """

    output: Path
    files: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int
    dtype: str | None
    adapter: str | None
    hashes_verified: bool


def merge_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    dtype: MergeDType | None = None,
    max_shard_size: str = "5GB",
    verify_hashes: bool = False,
    overwrite: bool = False,
    base: Path | None = None,
) -> MergeReport:
    """Write the weights of ``checkpoint`` as safetensors, with the config and tokenizer files that belong to them.

    The Hugging Face model of the checkpoint is written under its own names; a module that holds none is written whole
    to ``model.safetensors``. LoRA adapters are merged into the weights. Optimizer state is left out. A quantised base
    is de-quantised, layer by layer, before adapters are added; only that needs torch and bitsandbytes.

    Args:
        checkpoint: A checkpoint directory.
        output: Folder to make; must not exist, or be empty. It appears at once and whole, or not at all.
        dtype: Cast floating-point tensors (round to nearest even); None keeps the bytes as they are.
        max_shard_size: Most bytes of tensor data per file, such as ``"5GB"`` or ``"500MiB"``.
        verify_hashes: Compare the SHA-256 of every file of the checkpoint. Without it a changed byte is found where it
            would reach the output (CRC-32), but not in optimizer state, which is not read.
        overwrite: Replace an earlier export or merge (a folder of such files alone) once the new one is whole.
        base: Where the pretrained folder lies now, for a checkpoint that leaves its frozen weights to it and whose
            folder has moved. Its files are compared with those of the training run.

    Raises:
        CheckpointError: The checkpoint is not whole, or unsafe; the pretrained folder is gone or has changed.
        ConfigurationError: ``dtype`` or ``max_shard_size`` is not allowed.
        ExportError: The output exists or lies in a checkpoint, or the model cannot be written this way.
    """
    _check_dtype(dtype)
    limit = parse_size(max_shard_size)
    manifest = verify(checkpoint, hashes=False)
    folder_of_base = None if manifest.base is None else verified_base(manifest.base, base)
    with (
        fresh_folder(output, sync=False, overwrite=overwrite) as folder,
        hashing_meanwhile(checkpoint, manifest, enabled=verify_hashes),
    ):
        config = read_config(checkpoint, manifest)
        stored = stored_weights(manifest, read_index(checkpoint), checkpoint, folder_of_base)
        tensors = with_expert_names(_outputs(manifest, stored, config, checkpoint, dtype), config)
        ties = manifest.tied if config is None else None
        files = write_weights(folder, tensors, max_shard_size=limit, metadata=ties)
        faultpoint(POINT_BEFORE_CONFIG)
        if config is not None:
            write_config(folder, config, dtype=_main_dtype(tensors), untied=is_untied(manifest))
            copy_companions(folder, checkpoint, manifest)
    return MergeReport(
        output=output,
        files=files,
        tensors=sum(len(tensor.entries) for tensor in tensors),
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtype=_main_dtype(tensors),
        adapter=next(iter(manifest.adapters), None) if manifest.adapters else None,
        hashes_verified=verify_hashes,
    )


def _check_dtype(dtype: str | None) -> None:
    if dtype is not None and dtype not in get_args(MergeDType):
        raise ConfigurationError(f"{dtype!r} is not one of {', '.join(get_args(MergeDType))}.", where="dtype")


def _outputs(
    manifest: Manifest,
    stored: Mapping[str, Weight],
    config: Mapping[str, Any] | None,
    checkpoint: Path,
    dtype: str | None,
) -> list[OutputTensor]:
    tensors = model_tensors(manifest, stored, config)
    if manifest.adapters is None:
        return [_plain(name, tensor, checkpoint, dtype) for name, tensor in tensors.items()]
    from lightning_swift.checkpoint.lora import adapted_weights

    weights = adapted_weights(tensors, manifest.adapters)
    return [
        _plain(name, weight.base, checkpoint, dtype) if weight.a is None else _adapted(name, weight, checkpoint, dtype)
        for name, weight in weights.items()
    ]


def _plain(name: str, tensor: Weight, checkpoint: Path, dtype: str | None) -> OutputTensor:
    target = _target(tensor, dtype)
    return OutputTensor(name, target, tensor.shape, partial(_blocks, checkpoint, tensor, target))


def _adapted(name: str, weight: AdaptedWeight, checkpoint: Path, dtype: str | None) -> OutputTensor:
    target = _target(weight.base, dtype)
    return OutputTensor(name, target, weight.base.shape, partial(weight.blocks, streaming(checkpoint), target))


def _target(tensor: Weight, dtype: str | None) -> str:
    # A quantised weight is streamed in float32, whatever the model is in.
    return dtype if dtype is not None and tensor.dtype in FLOATS else getattr(tensor, "kept", tensor.dtype)


def _blocks(checkpoint: Path, tensor: Weight, target: str) -> Iterable[Block]:
    faultpoint(POINT_TENSOR)
    blocks = streaming(checkpoint)(tensor)
    if target == tensor.dtype:
        return blocks
    from lightning_swift.checkpoint.casting import Caster

    return map(Caster(tensor.dtype, target, where=tensor.name), blocks)


def _main_dtype(tensors: Iterable[OutputTensor]) -> str | None:
    count: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOATS:
            count[tensor.dtype] += tensor.nbytes
    return count.most_common(1)[0][0] if count else None
