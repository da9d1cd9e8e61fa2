"""The files of a checkpoint directory and the manifest that describes them (format version 1). Imports no torch.

``NAME.ckpt/`` holds ``manifest.json``, ``.metadata`` and ``__R_N.distcp`` (torch.distributed.checkpoint), ``meta.pt``
(the rest of Lightning's checkpoint) and, where the module holds a Hugging Face model, ``huggingface/`` with its
config and tokenizer files. The manifest is written last: a directory without a valid one is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_swift.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsafeCheckpointError

__all__ = [
    "FORMAT_VERSION",
    "HUGGINGFACE",
    "MANIFEST",
    "META",
    "METADATA",
    "MODEL_PREFIX",
    "BaseFile",
    "BaseRecord",
    "BaseTensor",
    "FileRecord",
    "Manifest",
    "RunRecord",
    "TensorRecord",
    "contained",
    "read_manifest",
]

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"
META = "meta.pt"
HUGGINGFACE = "huggingface"
MODEL_PREFIX = "model."

_CHECKSUM = "checksum"
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 (hexadecimal) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class TensorRecord:
    """Global shape and dtype (``"float32"``) of one tensor, keyed by its full name in the checkpoint."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RunRecord:
    """The training run a checkpoint belongs to; a resumed run keeps the record of the run it continues."""

    id: str
    started: str


@dataclass(frozen=True)
class BaseFile:
    """Size in bytes of a file of a pretrained folder, and ``"sha256:..."`` or ``"crc32:..."`` of its content."""

    size: int
    digest: str


@dataclass(frozen=True)
class BaseTensor:
    """A tensor that is left to the pretrained folder.

    Args:
        name: Its name there.
        shape: Its shape.
        dtype: The model's dtype of it.
        parts: Where the model has one tensor for many of the folder (fused experts), the names of these in the order
            in which their elements follow one another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaseRecord:
    """The pretrained folder that the frozen weights of a model come from, where the checkpoint does not repeat them.

    Args:
        folder: Absolute path when the checkpoint was saved.
        files: Its config and weight files, by name.
        tensors: What is to be taken from it, by parameter name (without the ``model.`` section prefix).
    """

    folder: str
    files: dict[str, BaseFile]
    tensors: dict[str, BaseTensor]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds and how to tell that it is whole.

    Args:
        run: The training run.
        global_step: Optimizer steps taken.
        strategy: Class name of the strategy that wrote the checkpoint.
        mesh: Size of each mesh axis.
        files: Every other file of the directory, by name relative to it.
        tensors: Every tensor, by its key in ``.metadata``.
        tied: Alias to canonical parameter name (both without the ``model.`` section prefix); only the canonical
            tensor is stored.
        huggingface: Path of the Hugging Face model inside the LightningModule (``"model"``), or None.
        weights_only: True when optimizer and loop state were left out.
        samples_seen: Training samples consumed by all ranks together, where the data module reports it.
        created: Time of the save, ISO 8601 in UTC.
        adapters: Adapter description (peft config), or None.
        quantization: Description of a quantised base, or None: ``kind`` (``"nf4"``, ``"fp4"``, ``"int8"``), how it is
            made (``double_quant``, ``blocksize``, ``dtype``), and ``layers``: shapes of the quantised weights by name.
        base: The folder that holds the frozen weights, where they are not in the checkpoint.
    """

    run: RunRecord
    global_step: int
    strategy: str
    mesh: dict[str, int]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    tied: dict[str, str]
    huggingface: str | None
    weights_only: bool
    samples_seen: int | None
    created: str
    versions: dict[str, str]
    adapters: dict[str, Any] | None = None
    quantization: dict[str, Any] | None = None
    base: BaseRecord | None = None
    format_version: int = field(default=FORMAT_VERSION)

    def to_json(self) -> str:
        """The manifest as JSON text with sorted keys and a checksum of its own."""
        # Through JSON once, so that the checksum is taken of what a reader will see (text keys, lists).
        content = json.loads(json.dumps(asdict(self)))
        return json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Manifest:
        """Parse and check a manifest.

        Raises:
            CheckpointCorruptError: The text is not a version 1 manifest, or was changed since it was written.
        """
        try:
            raw = json.loads(text, object_pairs_hook=_unique)
            _check_version(raw, where)
            if raw.pop(_CHECKSUM) != _checksum(raw):
                raise ValueError("its checksum differs")
            raw["run"] = RunRecord(**raw["run"])
            raw["files"] = {name: FileRecord(**record) for name, record in raw["files"].items()}
            raw["tensors"] = {
                name: TensorRecord(shape=tuple(record["shape"]), dtype=record["dtype"])
                for name, record in raw["tensors"].items()
            }
            raw["base"] = _base_record(raw.get("base"))
            manifest = cls(**raw)
            _check_types(manifest)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"not a valid manifest ({type(error).__name__}: {error}).",
                where=where,
                fix="Use another checkpoint of the run.",
            ) from error
        return manifest


def _base_record(raw: Any) -> BaseRecord | None:
    if raw is None:
        return None
    files = {name: BaseFile(**record) for name, record in raw["files"].items()}
    tensors = {
        # Checkpoints of the first releases know no parts.
        name: BaseTensor(record["name"], tuple(record["shape"]), record["dtype"], tuple(record.get("parts", ())))
        for name, record in raw["tensors"].items()
    }
    for name in files:
        if not _NAME.fullmatch(name) or name in {".", ".."}:
            raise ValueError(f"{name!r} is no plain name of a file")
    return BaseRecord(folder=raw["folder"], files=files, tensors=tensors)


def _checksum(content: dict[str, Any]) -> str:
    """SHA-256 of the content in a spelling that does not depend on white space or the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return content


def _check_version(raw: Any, where: str) -> None:
    version = raw["format_version"]
    if version != FORMAT_VERSION:
        raise CheckpointCorruptError(
            f"format version {version!r} is not {FORMAT_VERSION}.",
            where=where,
            fix="Read it with the version of lightning_swift that wrote it.",
        )


def _check_types(manifest: Manifest) -> None:
    """Raise TypeError where the JSON holds another type than the manifest declares."""
    texts = [manifest.run.id, manifest.run.started, manifest.strategy, manifest.created]
    texts += [*manifest.tied.keys(), *manifest.tied.values(), *manifest.versions.values()]
    texts += [record.sha256 for record in manifest.files.values()]
    texts += [record.dtype for record in manifest.tensors.values()]
    texts += [] if manifest.huggingface is None else [manifest.huggingface]
    numbers = [manifest.global_step, *manifest.mesh.values(), *(record.size for record in manifest.files.values())]
    numbers += [length for record in manifest.tensors.values() for length in record.shape]
    numbers += [] if manifest.samples_seen is None else [manifest.samples_seen]
    if manifest.base is not None:
        texts += [manifest.base.folder, *(file.digest for file in manifest.base.files.values())]
        tensors = manifest.base.tensors.values()
        texts += [text for tensor in tensors for text in (tensor.name, tensor.dtype, *tensor.parts)]
        numbers += [file.size for file in manifest.base.files.values()]
        numbers += [length for tensor in tensors for length in tensor.shape]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is not a text")
    # bool is an int to Python, not to a reader of the manifest.
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a number is not a natural number")
    if manifest.quantization is not None:
        layers = manifest.quantization["layers"]
        texts += [manifest.quantization["kind"], manifest.quantization["dtype"], *layers]
        numbers += [length for shape in layers.values() for length in shape]
    optional = (manifest.adapters, manifest.quantization)
    if type(manifest.weights_only) is not bool or not all(isinstance(part, dict | None) for part in optional):
        raise TypeError("a flag or a description has the wrong type")


def contained(directory: Path, name: str) -> Path:
    """The path of ``name`` inside ``directory``, refused if it could lead anywhere else.

    Raises:
        UnsafeCheckpointError: The name has parts other than plain file names, or is a link or a special file.
    """
    parts = name.split("/")
    plain = all(_NAME.fullmatch(part) and part not in {".", ".."} for part in parts)
    if not plain or len(parts) > 2 or (len(parts) == 2 and parts[0] != HUGGINGFACE):
        raise UnsafeCheckpointError(f"file name {name!r} leads outside the checkpoint.", where=str(directory))
    path = directory.joinpath(*parts)
    for step in (path, *([path.parent] if len(parts) == 2 else [])):
        if step.is_symlink() or (step.exists() and not (step.is_dir() if step != path else step.is_file())):
            raise UnsafeCheckpointError(f"{name!r} is not a regular file.", where=str(directory))
    return path


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of ``directory`` without checking the other files.

    Raises:
        CheckpointNotFoundError: There is no manifest, so this is not a (whole) checkpoint.
        CheckpointCorruptError: The manifest cannot be understood.
    """
    path = contained(directory, MANIFEST)
    try:
        text = path.read_text(encoding="utf-8")
    except NotADirectoryError as error:
        raise CheckpointNotFoundError(
            "this is a file; a sharded checkpoint is a directory.",
            where=str(directory),
            fix="If it is an ordinary checkpoint of Lightning: resume from it with a strategy of lightning_swift "
            "(`lightning-swift fit --ckpt_path FILE`), which saves sharded checkpoints from then on, or read it with "
            "torch.load.",
        ) from error
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            "no manifest.json here, so this is not a whole checkpoint.",
            where=str(directory),
            fix='Name a directory that a strategy of lightning_swift has saved, or use ckpt_path="newest".',
        ) from error
    except UnicodeDecodeError as error:
        raise CheckpointCorruptError("the manifest is not text.", where=str(path)) from error
    return Manifest.from_json(text, where=str(path))
