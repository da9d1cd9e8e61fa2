"""Which tensor of a Hugging Face folder belongs to which name of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_swift.errors import ModelError
from lightning_swift.models._folder import FolderTensor
from lightning_swift.models._fused import fuse, fusing_converters

__all__ = ["folder_names", "listed", "match_names", "unwrapped"]

# Names shown in an error before the rest is only counted.
_SHOWN = 8
# What checkpointing, torch.compile and peft put into the names of the parameters they wrap.
_WRAPPERS = re.compile(r"(?:_checkpoint_wrapped_module|_orig_mod|base_layer|original_module|modules_to_save\.[^.]+)\.")


def match_names(model: Any, tensors: Mapping[str, FolderTensor], folder: Path) -> dict[str, FolderTensor]:
    """Which tensor of the folder each name of ``model`` is, following transformers' own renaming.

    Raises:
        ModelError: The folder lacks a parameter of the model (under its own or a tied name), or a shape differs.
    """
    wanted: dict[str, Tensor] = model.state_dict(keep_vars=True)
    converters = fusing_converters(_mapping(model))
    found = fuse(tensors, _renaming(model, wanted, converters), converters)
    present = {id(wanted[name]) for name in found if name in wanted}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(name for name, value in parameters.items() if id(value) not in present)
    if missing:
        raise ModelError(
            f"the folder has no weights for {listed(missing)} of {type(model).__name__}.",
            where=str(folder),
            fix="Load it with from_pretrained, which converts or newly initialises them, or choose another auto_class.",
        )
    wrong = [name for name in sorted(found) if name in wanted and found[name].shape != tuple(wanted[name].shape)]
    if wrong:
        shapes = f"{wrong[0]!r} is {list(found[wrong[0]].shape)} in the folder and {list(wanted[wrong[0]].shape)}"
        raise ModelError(
            f"{len(wrong)} tensors have another shape in the folder: {shapes} in the model.",
            where=str(folder),
            fix="Remove the configuration override that changes this size, or correct config.json.",
        )
    return found


def unwrapped(name: str) -> str:
    """A parameter's name in the plain model, from its name in one that is wrapped for adapters or compiled."""
    return _WRAPPERS.sub("", name)


def folder_names(model: Any, names: Iterable[str], tensors: Mapping[str, FolderTensor]) -> dict[str, FolderTensor]:
    """The tensors of a folder by the names that ``model`` has for them.

    Args:
        model: A ``PreTrainedModel``.
        names: Its names, as :func:`unwrapped` gives them.
        tensors: By their names in the folder.
    """
    converters = fusing_converters(_mapping(model))
    return fuse(tensors, _renaming(model, dict.fromkeys(names), converters), converters)


def _mapping(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _renaming(model: Any, wanted: Mapping[str, Any], converters: list[Any]) -> Callable[[str], tuple[str, str | None]]:
    """Gives the model's name of a folder's name, and the pattern of the converter that matched it, if one did."""
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    # Transforms that merge or split tensors in other ways are left out: what needs them is reported as missing.
    renamings = [transform for transform in _mapping(model) if isinstance(transform, WeightRenaming)]
    known = dict(wanted)

    def rename(name: str) -> tuple[str, str | None]:
        if name in known:
            return name, None
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        return str(target), pattern

    return rename


def listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
