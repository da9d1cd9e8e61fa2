"""Says what is in a checkpoint and whether it is whole, as plain data for ``inspect --json``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_swift.checkpoint.dtypes import ITEM_SIZES
from lightning_swift.checkpoint.layout import MODEL_PREFIX, TensorRecord, read_manifest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.errors import CheckpointError

__all__ = ["describe"]


def describe(checkpoint: Path, *, hashes: bool = True) -> dict[str, Any]:
    """What the manifest of ``checkpoint`` says, and whether the files agree with it.

    Args:
        checkpoint: A checkpoint directory.
        hashes: Also read every file and compare its SHA-256.

    Returns:
        JSON-able values. ``whole`` is the verdict and ``reason`` says why not; sizes are in bytes; ``model`` and
        ``optimizer`` count tensors, elements and bytes by dtype.

    Raises:
        CheckpointNotFoundError: There is no manifest.
        CheckpointCorruptError: The manifest cannot be understood, so there is nothing to describe.
    """
    manifest = read_manifest(checkpoint)
    reason = None
    try:
        verify(checkpoint, hashes=hashes)
    except CheckpointError as error:
        reason = str(error)
    base, quantized = manifest.base, manifest.quantization
    sections: dict[bool, list[TensorRecord]] = {True: [], False: []}
    for name, record in manifest.tensors.items():
        sections[name.startswith(MODEL_PREFIX)].append(record)
    return {
        "path": str(checkpoint),
        "whole": reason is None,
        "reason": reason,
        "hashes_verified": hashes and reason is None,
        "format_version": manifest.format_version,
        "run": asdict(manifest.run),
        "created": manifest.created,
        "global_step": manifest.global_step,
        "samples_seen": manifest.samples_seen,
        "strategy": manifest.strategy,
        "mesh": manifest.mesh,
        "weights_only": manifest.weights_only,
        "huggingface": manifest.huggingface,
        "model": _totals(sections[True]),
        "optimizer": _totals(sections[False]),
        "tied": manifest.tied,
        "adapters": manifest.adapters,
        "quantization": None if quantized is None else {**quantized, "layers": len(quantized["layers"])},
        "base": None if base is None else {"folder": base.folder, "tensors": len(base.tensors)},
        "versions": manifest.versions,
        "files": {name: record.size for name, record in sorted(manifest.files.items())},
        "bytes": sum(record.size for record in manifest.files.values()),
    }


def _totals(records: Iterable[TensorRecord]) -> dict[str, Any]:
    elements: Counter[str] = Counter()
    tensors = 0
    for record in records:
        tensors += 1
        elements[record.dtype] += math.prod(record.shape)
    # A dtype that this version does not know has no size here; verify has refused it already.
    sizes = {dtype: count * ITEM_SIZES.get(dtype, 0) for dtype, count in elements.items()}
    return {
        "tensors": tensors,
        "parameters": sum(elements.values()),
        "bytes": sum(sizes.values()),
        "dtypes": dict(sorted(sizes.items())),
    }
