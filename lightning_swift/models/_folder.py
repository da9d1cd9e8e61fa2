"""A local Hugging Face folder: its configuration, and where each tensor of its safetensors files lies.

Everything here is checked before a single weight is read: contained file names, whole headers, no code to run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lightning_swift.errors import ConfigurationError, ModelError

__all__ = [
    "IMPLEMENTATIONS",
    "FolderTensor",
    "WeightReader",
    "has_weights",
    "read_config",
    "read_json",
    "tensors_of",
    "unknown_option",
]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# A plain name in the folder itself: no separators, no parent, no control characters, not hidden.
_PLAIN_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Options of from_pretrained's configuration step that are no attribute of a configuration but are honoured by it.
IMPLEMENTATIONS = {"attn_implementation", "experts_implementation"}


@dataclass(frozen=True)
class FolderTensor:
    """One tensor of the folder: its name there, its file, and its whole shape.

    Args:
        name: Its name in the folder.
        file: The file that holds it.
        shape: Its shape.
        parts: Where the model has one tensor for many of the folder (fused experts), these many: along the first
            dimension of ``shape``, and for each index one below the other along the second. The name and file are
            then those of the first part.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    parts: tuple[tuple[FolderTensor, ...], ...] = ()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: The file cannot be read or does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"cannot be read as JSON ({error}).", where=str(path), fix="Fetch the model folder again."
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"holds a JSON {type(value).__name__}, not an object.", where=str(path), fix="Fetch the model folder again."
        )
    return value


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> Any:
    """The folder's ``PreTrainedConfig``, with ``overrides`` applied; never runs code from the folder.

    Raises:
        ModelError: The folder or its ``config.json`` is missing or unreadable, the architecture exists only as code
            in the folder (``auto_map``), or the weights are stored quantised.
        ConfigurationError: An override names no option of this configuration.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    raw = read_json(_config_file(folder))
    _refuse_foreign_code(raw, folder)
    if raw.get("quantization_config") is not None:
        raise ModelError(
            "the weights are stored quantised.",
            where=str(folder),
            fix="Take the folder of the unquantised model, or load this one with from_pretrained.",
        )
    try:
        config, unused = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True, return_unused_kwargs=True, **(overrides or {})
        )
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(
            f"config.json describes no model ({error}).",
            where=str(folder),
            fix="Correct the value named, or fetch the model folder again.",
        ) from None
    if unknown := sorted(set(unused) - IMPLEMENTATIONS - {"_from_auto", "name_or_path", "revision"}):
        raise unknown_option(config, unknown)
    return config


def unknown_option(config: Any, names: list[str]) -> ConfigurationError:
    """The error to raise for overrides that the configuration does not have."""
    return ConfigurationError(
        f"{type(config).__name__} has no option {', '.join(map(repr, names))}.",
        where="config_overrides",
        fix="Use a name that stands in config.json.",
    )


def _config_file(folder: Path) -> Path:
    if not folder.is_dir():
        raise ModelError(
            "is not a folder on this machine.",
            where=str(folder),
            fix="Give the path of a downloaded Hugging Face model folder.",
        )
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            "has no config.json.", where=str(folder), fix="Give the folder that holds config.json and the weights."
        )
    return config


def _refuse_foreign_code(raw: Mapping[str, Any], folder: Path) -> None:
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return
    if "auto_map" in raw:
        raise ModelError(
            f"model type {kind!r} exists only as code inside the folder (auto_map), which is never run.",
            where=str(folder / "config.json"),
            fix="Use a model that transformers itself has, or build this one in configure_model of your own module.",
        )
    raise ModelError(
        f"transformers has no model type {kind!r}.",
        where=str(folder / "config.json"),
        fix="Upgrade transformers, or correct model_type.",
    )


def has_weights(folder: Path) -> bool:
    """Whether weights of any kind lie in the folder, so that one who gives it surely wants them."""
    return any((folder / name).is_file() for name in (_INDEX, _SINGLE, *_PICKLES))


def tensors_of(folder: Path) -> dict[str, FolderTensor]:
    """Every tensor of the folder's safetensors files, by name; reads the headers only.

    Raises:
        ModelError: There are no safetensors files, a file name of the index leads elsewhere, a file is missing or
            damaged, or the index and the headers disagree.
    """
    index = folder / _INDEX
    if index.is_file():
        claimed = _weight_map(index)
    elif (folder / _SINGLE).is_file():
        claimed = None
    else:
        raise _no_weights(folder)
    found: dict[str, FolderTensor] = {}
    for file in sorted(set(claimed.values()) if claimed is not None else {_SINGLE}):
        found.update(_header(folder, file))
    if claimed is None:
        return found
    if wrong := sorted(name for name, file in claimed.items() if name not in found or found[name].file != file):
        raise ModelError(
            f"names {len(wrong)} tensors that are not in the file named for them, such as {wrong[0]!r}.",
            where=str(index),
            fix="Fetch the model folder again.",
        )
    return {name: found[name] for name in claimed}


def _weight_map(index: Path) -> dict[str, str]:
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise ModelError("has no weight_map.", where=str(index), fix="Fetch the model folder again.")
    for file in weights.values():
        if not isinstance(file, str) or not _PLAIN_FILE.fullmatch(file):
            raise ModelError(
                f"file name {file!r} is not the name of a safetensors file beside it.",
                where=str(index),
                fix="Do not use this folder: its index leads out of it.",
            )
    return weights


def _no_weights(folder: Path) -> ModelError:
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if not pickles:
        return ModelError(
            f"has neither {_SINGLE} nor {_INDEX}.", where=str(folder), fix="Fetch the model's weights into it."
        )
    return ModelError(
        f"has pickled weights only ({pickles[0]}), which can run code when they are read.",
        where=str(folder),
        fix="Convert them once, in a place you trust, with save_pretrained, which writes safetensors.",
    )


def _header(folder: Path, file: str) -> dict[str, FolderTensor]:
    with WeightReader(folder) as reader:
        handle = reader.open(file)
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    return {name: FolderTensor(name, file, shape) for name, shape in shapes.items()}


@dataclass
class WeightReader:
    """Open safetensors files of one folder; reads slices and counts the bytes it hands out."""

    folder: Path
    bytes_read: int = 0
    _open: dict[str, Any] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def open(self, file: str) -> Any:
        """The handle of ``file``, mapped into memory and not read.

        Raises:
            ModelError: The file is missing, special, or its header does not fit its length.
        """
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise ModelError(
                    "is missing or is no regular file.", where=str(path), fix="Fetch the model folder again."
                )
            try:
                self._open[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"is damaged ({error}).", where=str(path), fix="Fetch the model folder again."
                ) from None
        return self._open[file]

    def read(self, tensor: FolderTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """The part of ``tensor`` of shape ``sizes`` that begins at ``offsets``."""
        if tensor.parts:
            return self._read_parts(tensor, offsets, sizes)
        handle = self.open(tensor.file)
        if sizes == tensor.shape:
            part = handle.get_tensor(tensor.name)
        else:
            part = handle.get_slice(tensor.name)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        self.bytes_read += part.numel() * part.element_size()
        return part

    def _read_parts(self, tensor: FolderTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        import torch

        (first, start, *rest), (count, rows, *widths) = offsets, sizes
        if count == 0 or rows == 0:
            return torch.empty(sizes)
        found = []
        for parts in tensor.parts[first : first + count]:
            pieces, below = [], 0
            for part in parts:
                begin, end = max(start - below, 0), min(start + rows - below, part.shape[0])
                below += part.shape[0]
                if begin < end:
                    pieces.append(self.read(part, (begin, *rest), (end - begin, *widths)))
            found.append(torch.cat(pieces))
        return torch.stack(found)
