"""Saving and loading of sharded state: torch.distributed.checkpoint inside the commit protocol, with safe types only.

``state`` is a flat dict: ``model.<fqn>``, ``optimizer_<i>.state.<fqn>.<key>``, ``optimizer_<i>.param_groups.<fqn>.
<option>``. Tensors may be DTensors of any placement; each rank writes and reads its own part. Other values are
stored as bytes and read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from lightning_swift.checkpoint._dcp import SafeLoadPlanner, SafeReader, SyncedWriter
from lightning_swift.checkpoint.commit import commit, locate, record_file
from lightning_swift.checkpoint.layout import (
    HUGGINGFACE,
    META,
    METADATA,
    BaseRecord,
    FileRecord,
    Manifest,
    RunRecord,
    TensorRecord,
)
from lightning_swift.checkpoint.lora import with_all_targets
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.checkpoint.unpickle import load_torch_metadata
from lightning_swift.errors import CheckpointMismatchError, UnsafeCheckpointError

__all__ = ["Description", "LoadReport", "load_into", "load_meta", "read_index", "save"]

# Names listed per kind in an error message; the rest is counted.
_LISTED = 8


@dataclass(frozen=True)
class Description:
    """What the manifest says beyond the files and tensors; the fields are those of :class:`Manifest`."""

    run: RunRecord
    global_step: int
    strategy: str
    mesh: dict[str, int]
    tied: dict[str, str] = field(default_factory=dict)
    huggingface: str | None = None
    weights_only: bool = False
    samples_seen: int | None = None
    adapters: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    base: BaseRecord | None = None


@dataclass(frozen=True)
class LoadReport:
    """How the names of a checkpoint and of the state to be filled correspond.

    Args:
        loaded: Names that were read.
        missing: Names asked for that the checkpoint does not have; they keep their values.
        unexpected: Names in the checkpoint that nobody asked for.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def save(
    path: Path,
    *,
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    description: Description,
    extra_files: Callable[[Path], None] | None = None,
) -> None:
    """Write and commit one checkpoint. A collective call; works without torch.distributed too.

    Args:
        path: Directory to create (or to replace, if it is a checkpoint of the same run).
        state: Flat state; every rank passes the same names.
        meta: The rest, of types that ``torch.load(weights_only=True)`` accepts; only rank 0's is written.
        description: What goes into the manifest.
        extra_files: Called on rank 0 with the directory; may write files into ``huggingface/``.

    Raises:
        CheckpointError: On every rank, if anything failed on any of them.
        UnsafeCheckpointError: ``meta`` or a value of ``state`` could not be read back safely.
    """
    ranks = Ranks.current()
    tensors: dict[str, TensorRecord] = {}
    with Together(ranks, "checking the state", path):
        _check_safe({name: value for name, value in state.items() if not isinstance(value, torch.Tensor)})

    def write(directory: Path) -> dict[str, FileRecord]:
        writer = SyncedWriter(directory)
        with _quiet():
            metadata = dcp_save(
                dict(state),
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=ranks.group,
            )
        tensors.update(_tensor_records(metadata))
        files = dict(writer.records)
        if ranks.rank == 0:
            files.update(_write_rest(directory, meta, extra_files))
        return files

    def describe(files: dict[str, FileRecord]) -> Manifest:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        fields = {name: getattr(description, name) for name in Description.__dataclass_fields__}
        if description.adapters is not None:
            fields["adapters"] = with_all_targets(description.adapters, tensors)
        return Manifest(files=files, tensors=tensors, created=created, versions=_versions(), **fields)

    commit(path, write, describe, run_id=description.run.id)


def load_meta(path: Path) -> dict[str, Any]:
    """The content of ``meta.pt``, by torch's allow-list of types only.

    Raises:
        UnsafeCheckpointError: It holds a type that is not on the list; nothing of it was run.
    """
    return _load_safely(locate(path) / META)


def read_index(path: Path) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    """Every name in a checkpoint with shape and dtype of its tensor; None for a value that is not a tensor."""
    return _index(load_torch_metadata(locate(path) / METADATA))


def load_into(
    path: Path, state: dict[str, Any], *, strict: bool, ignore: Callable[[str], bool] | None = None
) -> LoadReport:
    """Fill the tensors of ``state`` in place and replace its other values. A collective call.

    Names and shapes are compared first; nothing is touched if they do not correspond. The files are taken as
    verified (:func:`~lightning_swift.checkpoint.safe_load.verify`).

    Args:
        path: A committed checkpoint.
        state: Flat state. Any value that is not a tensor is a placeholder.
        strict: Whether missing and unexpected names are errors. Shapes that differ always are.
        ignore: Names of the checkpoint for which this returns True are not unexpected.

    Raises:
        CheckpointMismatchError: On every rank, with the names.
    """
    ranks = Ranks.current()
    directory = locate(path)
    with Together(ranks, "comparing the names", path) as step:
        metadata = load_torch_metadata(directory / METADATA)
        index = _index(metadata)
        lacking = state.keys() - index.keys()
        unused = {name for name in index.keys() - state.keys() if ignore is None or not ignore(name)}
        step.value = (lacking, unused)
        wrong = _mis_shaped(state, index)
        if wrong:
            raise _mismatch(directory, sorted(lacking) if strict else (), sorted(unused) if strict else (), wrong)
    # Ranks may ask for different names (stages of a pipeline): what any of them uses is not unexpected.
    missing = tuple(sorted(set[str]().union(*(names for names, _ in step.values))))
    unexpected = tuple(sorted(set.intersection(*(names for _, names in step.values))))
    if strict and (missing or unexpected):
        raise _mismatch(directory, missing, unexpected, ())
    wanted = {name: value for name, value in state.items() if name in index}
    with Together(ranks, "reading", path), _quiet():
        reader = SafeReader(directory, metadata)
        dcp_load(wanted, storage_reader=reader, planner=SafeLoadPlanner(), process_group=ranks.group)
    state.update(wanted)
    return LoadReport(loaded=tuple(sorted(wanted)), missing=missing, unexpected=unexpected)


def _write_rest(
    directory: Path, meta: Mapping[str, Any], extra_files: Callable[[Path], None] | None
) -> dict[str, FileRecord]:
    buffer = io.BytesIO()
    torch.save(dict(meta), buffer)
    (directory / META).write_bytes(buffer.getbuffer())
    names = [META, METADATA]
    if extra_files is not None:
        extra_files(directory)
        folder = directory / HUGGINGFACE
        names += [f"{HUGGINGFACE}/{entry.name}" for entry in (folder.iterdir() if folder.is_dir() else ())]
    return {name: record_file(directory / name) for name in names}


def _tensor_records(metadata: Metadata) -> dict[str, TensorRecord]:
    return {
        name: TensorRecord(shape=tuple(entry[0]), dtype=str(entry[1]).removeprefix("torch."))
        for name, entry in _index(metadata).items()
        if entry is not None
    }


def _index(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    index: dict[str, tuple[torch.Size, torch.dtype] | None] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            index[name] = (entry.size, entry.properties.dtype)
        elif isinstance(entry, BytesStorageMetadata):
            index[name] = None
    return index


def _mis_shaped(
    state: Mapping[str, Any], index: Mapping[str, tuple[torch.Size, torch.dtype] | None]
) -> tuple[str, ...]:
    wrong = []
    for name in sorted(state.keys() & index.keys()):
        value, entry = state[name], index[name]
        if entry is None and isinstance(value, torch.Tensor):
            wrong.append(f"{name} (a tensor here, another value in the checkpoint)")
        elif entry is not None and not isinstance(value, torch.Tensor):
            wrong.append(f"{name} (a tensor in the checkpoint, another value here)")
        elif entry is not None and value.shape != entry[0]:
            wrong.append(f"{name} ({tuple(entry[0])} in the checkpoint, {tuple(value.shape)} here)")
        elif entry is not None and value.is_floating_point() != entry[1].is_floating_point:
            wrong.append(f"{name} ({entry[1]} in the checkpoint, {value.dtype} here)")
    return tuple(wrong)


def _mismatch(
    directory: Path, missing: Sequence[str], unexpected: Sequence[str], wrong: Sequence[str]
) -> CheckpointMismatchError:
    parts = [
        f"{len(names)} {kind} ({', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''})"
        for kind, names in (
            ("missing from the checkpoint", missing),
            ("in the checkpoint only", unexpected),
            ("of another shape or type", wrong),
        )
        if names
    ]
    return CheckpointMismatchError(
        f"the checkpoint does not fit the model; nothing was loaded: {'; '.join(parts)}.",
        where=str(directory),
        fix="Build the model and optimizers as they were when it was saved, or set strict_loading=False in the "
        "LightningModule to load the names that correspond.",
    )


def _check_safe(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if _is_plain(value):
            continue
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{name} is a {type(value).__name__}, which cannot be read back safely.",
                fix="Keep numbers, strings, tensors and containers of them, or allow the type with "
                "torch.serialization.add_safe_globals before saving and loading.",
            ) from error


def _is_plain(value: Any) -> bool:
    """Whether a value is evidently safe, so that the thousands of group options need no trial."""
    if type(value) in {tuple, list}:
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in {bool, int, float, str}


def _load_safely(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            "holds a type that is not on torch's list of safe types; nothing was run.",
            where=str(file),
            fix="If you trust it, allow the type with torch.serialization.add_safe_globals.",
        ) from error
    return content


def _versions() -> dict[str, str]:
    """Versions of what decides the content; only of packages in use, so that no package is looked up in vain."""
    names = {"lightning": "lightning", "torch": "torch", "transformers": "transformers", "peft": "peft"}
    found = {package: version(package) for module, package in names.items() if module in sys.modules}
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch.distributed, torch warns that it assumes a single process, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
