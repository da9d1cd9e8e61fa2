"""Exports a checkpoint as a folder that inference engines load, and proves it by reloading it in a fresh process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from lightning_swift.checkpoint.adapter import write_adapter
from lightning_swift.checkpoint.base import base_entries, verified_base
from lightning_swift.checkpoint.commit import locate
from lightning_swift.checkpoint.export_logits import digests_of, logits_of, token_ids
from lightning_swift.checkpoint.export_reference import build_reference, common_dtype
from lightning_swift.checkpoint.export_verify import ROUNDING, Expected, Verdict, quantised_tolerance, verify_folder
from lightning_swift.checkpoint.layout import Manifest
from lightning_swift.checkpoint.lora import only_adapter
from lightning_swift.checkpoint.merge import MergeDType, merge_checkpoint
from lightning_swift.checkpoint.output import fresh_folder
from lightning_swift.checkpoint.safe_load import verify as verify_checkpoint
from lightning_swift.errors import ConfigurationError, ExportError

__all__ = ["ExportFormat", "ExportReport", "check_base", "check_format", "export_checkpoint", "report_on"]

ExportFormat = Literal["safetensors", "adapter"]


@dataclass(frozen=True)
class ExportReport:
    """What an export has written and how it was checked.

    Args:
        output: The folder.
        format: ``"safetensors"`` or ``"adapter"``.
        files: Names of its files.
        nbytes: Size of all of them together.
        dtype: Dtype of the weights when loaded; None if the export was not verified.
        verified: Whether a fresh process has reloaded and compared it.
        max_logit_gap: Largest difference of a logit from the trained model's; 0 means equal bits.
        tokens: Tokens whose logits were compared.
        tensors: Tensors whose values were compared as well (0 where the adapter was merged into them).
    """

    output: Path
    format: ExportFormat
    files: tuple[str, ...]
    nbytes: int
    dtype: str | None
    verified: bool
    max_logit_gap: float | None
    tokens: int
    tensors: int


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    format: ExportFormat = "safetensors",
    dtype: MergeDType | None = None,
    max_shard_size: str = "5GB",
    verify: bool = True,
    overwrite: bool = False,
    base: Path | None = None,
) -> ExportReport:
    """Make a folder that ``from_pretrained`` and inference engines load.

    With ``verify`` the folder is loaded in a fresh process, from its own files only, and held against the checkpoint,
    whose tensors are read by another way into a model of its config: every tensor and every logit must have the same
    bits (those of the cast tensors if ``dtype`` is given). Where an adapter was merged, logits may differ by rounding.
    Verification needs memory for the whole model, twice in turn. Works in one process, outside of training.

    Args:
        checkpoint: A checkpoint directory.
        output: Folder to make; must not exist, or be empty. Nothing is left there if anything fails.
        format: ``"safetensors"``: the model, adapters merged. ``"adapter"``: the peft adapter alone.
        dtype: Cast the weights; None keeps them as they are. Not for adapters.
        max_shard_size: Most bytes of tensors in one file.
        verify: Reload and compare.
        overwrite: Replace an earlier export (a folder of such files alone) once the new one is verified.
        base: Where the pretrained folder lies now that the checkpoint leaves its frozen weights to, or that its adapter
            was trained on, if it has moved.

    Raises:
        CheckpointError: The checkpoint is not whole, or unsafe; the pretrained folder is gone or has changed.
        ConfigurationError: Options that are not allowed.
        ExportError: The export cannot be made there or at all, or does not reproduce the checkpoint.
    """
    check_format(format, dtype)
    _refuse_company()
    checkpoint = locate(Path(checkpoint))
    manifest = verify_checkpoint(checkpoint)
    if manifest.huggingface is None:
        raise ExportError(
            "the checkpoint was made of a module that holds no Hugging Face model, or several.",
            where=str(checkpoint),
            fix="Use `lightning-swift merge` to get its weights as one safetensors file.",
        )
    given = None if base is None else Path(base)
    beneath = None if manifest.base is None or not (verify or format != "adapter") else _beneath(manifest, given)
    tried = str(beneath or given or check_base(manifest.adapters)) if format == "adapter" and verify else None
    with fresh_folder(Path(output), overwrite=overwrite) as folder:
        # The hashes have just been compared.
        if format == "adapter":
            write_adapter(checkpoint, folder, verify_hashes=False)
        else:
            merge_checkpoint(checkpoint, folder, dtype=dtype, max_shard_size=max_shard_size, base=given)
        expected = _expected(checkpoint, manifest, format, dtype, beneath) if verify else None
        verdict = None if expected is None else verify_folder(folder, expected, base=tried)
        return report_on(folder, Path(output), format, verdict)


def _refuse_company() -> None:
    # The checkpoint would be read by all ranks together, and only one of them can write the folder.
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigurationError(
            f"export_checkpoint was called in a group of {dist.get_world_size()} processes; it works in one.",
            where="export_checkpoint",
            fix="Use the ExportForInference callback, or `lightning-swift export` after the training.",
        )


def check_format(format: str, dtype: str | None) -> None:
    """Refuse a format that does not exist, and a dtype with an adapter.

    Raises:
        ConfigurationError: As said.
    """
    if format not in get_args(ExportFormat):
        raise ConfigurationError(
            f"format={format!r} is not one of {', '.join(get_args(ExportFormat))}.", where="export"
        )
    if dtype is not None and dtype not in get_args(MergeDType):
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(get_args(MergeDType))}.", where="export")
    if format == "adapter" and dtype is not None:
        raise ConfigurationError(
            'dtype and format="adapter" do not go together: adapters keep their dtype.',
            where="export",
            fix="Leave dtype out.",
        )


def check_base(adapters: Mapping[str, Any] | None) -> str:
    """Folder of the model that an adapter was trained on, by peft's configs of a model's adapters.

    Raises:
        ExportError: There is no adapter, or its base is not a folder on this machine.
    """
    _, config = only_adapter(adapters or {})
    base = config.get("base_model_name_or_path")
    if not base or not Path(str(base)).is_dir():
        raise ExportError(
            f"the adapter's base model {base!r} is no folder on this machine, so it cannot be tried.",
            fix="Make it available there, or export without verification (verify=False).",
        )
    return str(base)


def report_on(folder: Path, output: Path, format: ExportFormat, verdict: Verdict | None) -> ExportReport:
    """The report of an export whose files still lie in ``folder``."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return ExportReport(
        output=output,
        format=format,
        files=tuple(str(path.relative_to(folder)) for path in files),
        nbytes=sum(path.stat().st_size for path in files),
        dtype=None if verdict is None else verdict.dtype,
        verified=verdict is not None,
        max_logit_gap=None if verdict is None else verdict.max_logit_gap,
        tokens=0 if verdict is None else verdict.tokens,
        tensors=0 if verdict is None else verdict.tensors,
    )


def _beneath(manifest: Manifest, given: Path | None) -> Path:
    assert manifest.base is not None
    return verified_base(manifest.base, given)


def _expected(
    checkpoint: Path, manifest: Manifest, format: ExportFormat, dtype: str | None, base: Path | None
) -> Expected:
    stored = common_dtype(manifest)
    merged = manifest.adapters is not None and format == "safetensors"
    # An adapter is added in the precision of the checkpoint and rounded after that; everything else is rounded at once.
    compute = stored if dtype is None or merged else getattr(torch, dtype)
    reference = build_reference(checkpoint, manifest, dtype=compute, base=base)
    name = str(compute).removeprefix("torch.")
    ids = token_ids(reference.config)
    return Expected(
        ids=ids,
        logits=logits_of(reference, ids),
        dtype=name,
        tolerance=_tolerance(manifest, dtype, base, merged=merged),
        digests=digests_of(reference) if manifest.adapters is None else None,
        quantization=manifest.quantization,
    )


def _tolerance(manifest: Manifest, dtype: str | None, base: Path | None, *, merged: bool) -> float:
    narrowest = _narrowest(manifest)
    if merged:
        return ROUNDING[dtype or narrowest]
    # The adapter is tried on a quantised model, which has kernels of its own.
    if manifest.quantization is not None:
        return quantised_tolerance(manifest.quantization, narrowest)
    # Or on the folder's own numbers, which the trained model may have rounded when it read them.
    return ROUNDING[narrowest] if manifest.adapters is not None and _was_rounded(manifest, base) else 0.0


def _was_rounded(manifest: Manifest, base: Path | None) -> bool:
    if manifest.base is None or base is None:
        return False
    return any(entry.stored != entry.dtype for entry in base_entries(manifest.base, base).values())


def _narrowest(manifest: Manifest) -> str:
    stored = {record.dtype for record in manifest.tensors.values()}
    stored |= set() if manifest.base is None else {tensor.dtype for tensor in manifest.base.tensors.values()}
    return next((name for name in ("bfloat16", "float16") if name in stored), "float32")
