"""Checkpoints for tests: written by torch.distributed.checkpoint itself, described by a manifest made here."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_swift.checkpoint.distcp import read_index
from lightning_swift.checkpoint.layout import MANIFEST, FileRecord, Manifest, RunRecord, TensorRecord, read_manifest


def record(path: Path) -> FileRecord:
    data = path.read_bytes()
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def write_manifest(directory: Path, **fields: Any) -> Manifest:
    """Describe whatever lies in ``directory``; ``fields`` replaces what a small FSDP run would say."""
    files = {str(p.relative_to(directory)): record(p) for p in sorted(directory.rglob("*")) if p.is_file()}
    files.pop(MANIFEST, None)
    tensors = {name: TensorRecord(t.shape, t.dtype) for name, t in read_index(directory).tensors.items()}
    values: dict[str, Any] = {
        "run": RunRecord(id="run-1", started="2026-01-01T00:00:00Z"),
        "global_step": 10,
        "strategy": "FSDPBF16Strategy",
        "mesh": {"dp_shard": 2},
        "files": files,
        "tensors": tensors,
        "tied": {},
        "huggingface": None,
        "weights_only": False,
        "samples_seen": None,
        "created": "2026-01-01T01:00:00Z",
        "versions": {"torch": torch.__version__},
    }
    manifest = Manifest(**{**values, **fields})
    (directory / MANIFEST).write_text(manifest.to_json())
    return manifest


def edit_manifest(directory: Path, **fields: Any) -> None:
    """Rewrite single fields of a manifest, with a right checksum of its own."""
    (directory / MANIFEST).write_text(replace(read_manifest(directory), **fields).to_json())


def save_dcp(directory: Path, state: Mapping[str, Any]) -> None:
    """``dcp.save`` of the flat ``state``; collective where torch.distributed is in use."""
    with warnings.catch_warnings():
        # Saving from one process without a process group is what the single-process tests want.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        dcp.save(dict(state), checkpoint_id=directory)


def save_checkpoint(
    directory: Path, state: Mapping[str, Any], *, companions: Callable[[Path], object] | None = None, **fields: Any
) -> None:
    """A whole checkpoint of ``state`` (keys as in the format); collective where torch.distributed is in use.

    Args:
        directory: Must not exist.
        state: ``model.<fqn>`` and ``optimizer_0...`` entries.
        companions: Called with ``huggingface/`` to fill it.
        fields: Fields of the manifest.
    """
    save_dcp(directory, state)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"epoch": 0, "global_step": 10}, directory / "meta.pt")
        if companions is not None:
            (directory / "huggingface").mkdir()
            companions(directory / "huggingface")
        write_manifest(directory, **fields)
    if dist.is_initialized():
        dist.barrier()


def small_state() -> dict[str, Any]:
    """A few tensors of several dtypes and shapes, optimizer state, and objects that are not tensors."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "model.weight": values(6, 4),
        "model.bias": values(4).bfloat16(),
        "model.scale": values(3).half(),
        "model.steps": torch.tensor(7),
        "model.mask": torch.tensor([True, False, True]),
        "optimizer_0.state.weight.exp_avg": values(6, 4),
        "optimizer_0.state.weight.step": torch.tensor(10.0),
        "optimizer_0.param_groups.weight.lr": 1e-3,
        "optimizer_0.param_groups.weight.betas": (0.9, 0.95),
    }


def small_checkpoint(directory: Path, **fields: Any) -> Path:
    """A whole checkpoint of :func:`small_state`, with a file in ``huggingface/``."""

    def companions(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "none", "dtype": "float32"}))

    save_checkpoint(directory, small_state(), companions=companions, **fields)
    return directory
