"""Frozen weights that come unchanged from a pretrained folder: left out of checkpoints, and filled from it again.

Whether a weight is what the folder says is looked at and not assumed: each rank compares the part that it holds, once.
Only a model that was read lazily is taken at its word, because this package has filled it from the folder itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_swift.adapters.quantise import quantised_layers
from lightning_swift.checkpoint.base import base_files, describe_files
from lightning_swift.checkpoint.layout import BaseFile, BaseRecord, BaseTensor
from lightning_swift.checkpoint.pieces import Pieces
from lightning_swift.checkpoint.selection import WRAPPED
from lightning_swift.checkpoint.together import Ranks, Together
from lightning_swift.errors import CheckpointMismatchError, ConfigurationError, ModelError
from lightning_swift.models._folder import FolderTensor, WeightReader, tensors_of
from lightning_swift.models._naming import folder_names, unwrapped
from lightning_swift.models.lazy import lazy_folder
from lightning_swift.strategies._checkpoint_huggingface import HuggingFaceModel
from lightning_swift.strategies._checkpoint_quantised import is_same_quantised, quantised_dtype

__all__ = ["FrozenWeights", "SaveFrozen", "check_save_frozen", "companions_of", "fill_from_base"]

SaveFrozen = bool | Literal["auto"]

_Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class _Source:
    """The folder of a model and which of its tensors each of the model's saved names is."""

    folder: Path
    tensors: dict[str, FolderTensor]


def check_save_frozen(value: SaveFrozen) -> SaveFrozen:
    """``value`` if it is one of :data:`SaveFrozen`.

    Raises:
        ConfigurationError: It is not.
    """
    if not (isinstance(value, bool) or value == "auto"):
        raise ConfigurationError(
            f'save_frozen={value!r} is not true, false or "auto".', where="save_frozen", fix="Leave it out for auto."
        )
    return value


class FrozenWeights:
    """Which of a module's weights its pretrained folder holds, established once and kept.

    Args:
        module: The LightningModule.
        model: Its Hugging Face model.
        rename: From a name in the module to the name it is saved under.
    """

    def __init__(self, module: nn.Module, model: HuggingFaceModel, rename: Callable[[str], str]) -> None:
        self._module, self._model, self._rename = module, model, rename
        self._files: dict[str, BaseFile] | None = None
        self._equal: dict[str, bool] = {}
        self._source = _source_of(module, model, rename)

    @property
    def folder(self) -> Path | None:
        """The folder, if there is one to compare with."""
        return None if self._source is None else self._source.folder

    def record(self, values: Mapping[str, Any], frozen: set[str], *, believed: bool) -> BaseRecord | None:
        """The frozen weights that need not be saved, or None if there are none. A collective call.

        Args:
            values: What would be saved of the model on this rank, by saved name.
            frozen: Names of parameters that have never been trained.
            believed: Whether they are known to be the folder's, so that they need not be compared.
        """
        ranks = Ranks.current()
        known = set[str]() if self._source is None else frozen & self._source.tensors.keys() & values.keys()
        new = known - self._equal.keys()
        # A plain tensor that every rank has needs to be looked at by one of them only.
        shared = sorted(set.intersection(*ranks.gather(new)))
        others = {name for number, name in enumerate(shared) if number % ranks.size != ranks.rank}
        with Together(ranks, "comparing frozen weights with their folder", self.folder or Path()) as step:
            if self._source is not None:
                parts = {name for name in new if isinstance(values[name], DTensor | Pieces)}
                self._compare(self._source, values, new, skipped=new if believed else others - parts)
            step.value = {name: same for name, same in self._equal.items() if name in frozen}
        different = {name for own in step.values for name, same in own.items() if not same}
        names = {name for own in step.values for name in own} - different
        folder = ranks.broadcast(self.folder)
        if folder is None or not names:
            return None
        with Together(ranks, "describing the pretrained folder", folder):
            if ranks.rank == 0 and self._files is None:
                self._files = describe_files(folder, base_files(folder))
        # Ranks may hold different names (stages of a pipeline).
        tensors = {name: tensor for own in ranks.gather(self._tensors(values, names)) for name, tensor in own.items()}
        return BaseRecord(str(folder), self._files or {}, dict(sorted(tensors.items())))

    def _compare(self, source: _Source, values: Mapping[str, Any], names: set[str], *, skipped: set[str]) -> None:
        layers = _quantised_weights(self._module, self._rename)
        with WeightReader(source.folder) as reader:
            for name in sorted(names):
                tensor, value = source.tensors[name], values[name]
                if name in skipped:
                    self._equal[name] = True
                elif name in layers:
                    whole = partial(_whole, reader, tensor)
                    self._equal[name] = is_same_quantised(layers[name], value, self._module, whole)
                else:
                    self._equal[name] = tensor.shape == tuple(value.shape) and _is_equal(value, reader, tensor)

    def _tensors(self, values: Mapping[str, Any], names: set[str]) -> dict[str, BaseTensor]:
        if self._source is None:
            return {}
        layers = _quantised_weights(self._module, self._rename)
        found = {}
        for name in names & values.keys() & self._source.tensors.keys():
            tensor = self._source.tensors[name]
            dtype = quantised_dtype(layers[name], self._module) if name in layers else values[name].dtype
            parts = tuple(part.name for row in tensor.parts for part in row)
            found[name] = BaseTensor(tensor.name, tensor.shape, str(dtype).removeprefix("torch."), parts)
        return found


def companions_of(name: str, quantised: bool) -> tuple[str, ...]:
    """Prefixes of the entries that describe how the weight ``name`` is packed; they go where it goes."""
    layer = name.removesuffix("weight")
    return (f"{name}.", f"{layer}SCB", f"{layer}weight_format") if quantised else ()


@torch.no_grad()
def fill_from_base(
    values: Mapping[str, Any], base: BaseRecord, folder: Path, *, module: nn.Module, rename: Callable[[str], str]
) -> None:
    """Give the tensors that a checkpoint left to the pretrained folder their values, each rank its own part.

    Quantised weights cannot be filled in place; they must be those of the folder already.

    Raises:
        CheckpointMismatchError: A quantised weight here is another one.
    """
    layers = _quantised_weights(module, rename)
    with WeightReader(folder) as reader:
        held = tensors_of(folder)
        for name in sorted(base.tensors.keys() & values.keys()):
            value, tensor = values[name], _held(base.tensors[name], held)
            if name not in layers:
                _fill(value, reader, tensor)
            elif not is_same_quantised(layers[name], value, module, partial(_whole, reader, tensor)):
                raise CheckpointMismatchError(
                    f"the quantised weight {name} is not the one that the checkpoint was trained on top of.",
                    where=str(folder),
                    fix="Build the model from this folder, quantised as it was.",
                )


def _held(record: BaseTensor, held: Mapping[str, FolderTensor]) -> FolderTensor:
    """What the folder has for ``record``, put together where that is more than one tensor."""
    first = held[record.name]
    if not record.parts:
        return first
    below = len(record.parts) // record.shape[0]
    rows = [record.parts[start : start + below] for start in range(0, len(record.parts), below)]
    parts = tuple(tuple(held[name] for name in row) for row in rows)
    return FolderTensor(first.name, first.file, record.shape, parts)


def _source_of(module: nn.Module, model: HuggingFaceModel, rename: Callable[[str], str]) -> _Source | None:
    folder = lazy_folder(module) or Path(getattr(model.model.config, "_name_or_path", "") or "")
    if not folder.name or not (folder / "config.json").is_file() or not base_files(folder):
        return None
    try:
        held = tensors_of(folder)
    except ModelError:
        return None
    prefix = f"{model.path}." if model.path else ""
    plain = {
        saved: unwrapped(saved.removeprefix(prefix).removeprefix(WRAPPED))
        for name, _ in module.named_parameters(remove_duplicate=False)
        if (saved := rename(name)).startswith(prefix)
    }
    found = folder_names(model.model, plain.values(), held)
    tensors = {saved: found[name] for saved, name in plain.items() if name in found}
    _add_tied(module, rename, tensors)
    return _Source(folder.absolute(), tensors)


def _add_tied(module: nn.Module, rename: Callable[[str], str], tensors: dict[str, FolderTensor]) -> None:
    """Of two names of one parameter the folder often has one only, and not always the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(rename(name))
    for group in names.values():
        known = [tensors[name] for name in group if name in tensors]
        for name in group if known else ():
            tensors.setdefault(name, known[0])


def _quantised_weights(module: nn.Module, rename: Callable[[str], str]) -> dict[str, nn.Module]:
    return {rename(f"{name}.weight"): layer for name, layer in quantised_layers(module).items()}


def _whole(reader: WeightReader, tensor: FolderTensor) -> Tensor:
    whole: Tensor = reader.read(tensor, (0,) * len(tensor.shape), tensor.shape)
    return whole


def _locals(value: Any) -> Iterator[tuple[_Box, Tensor]]:
    """This rank's parts of a tensor, and where they lie in the whole."""
    if isinstance(value, Pieces):
        yield from (((box.offsets, box.sizes), part) for box, part in value.parts())
    elif isinstance(value, DTensor):
        local = value.to_local().detach()
        for chunk in value.__create_chunk_list__():
            if local.numel():
                yield (tuple(chunk.offsets), tuple(chunk.sizes)), local
    else:
        yield ((0,) * value.dim(), tuple(value.shape)), value.detach()


def _is_equal(value: Any, reader: WeightReader, tensor: FolderTensor) -> bool:
    return all(
        torch.equal(reader.read(tensor, offsets, sizes).to(device=part.device, dtype=part.dtype), part)
        for (offsets, sizes), part in _locals(value)
    )


def _fill(value: Any, reader: WeightReader, tensor: FolderTensor) -> None:
    for (offsets, sizes), part in _locals(value):
        part.copy_(reader.read(tensor, offsets, sizes))
