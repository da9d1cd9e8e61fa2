"""Fused experts: a model of transformers has one tensor where its folder has one for each expert and projection.

Which tensors go into which one, and how, is transformers' own conversion mapping; nothing here knows a model. Of its
operations the two that stack experts and put projections below one another are done lazily, slice by slice; a model
that needs others is refused as one whose weights are missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_swift.models._folder import FolderTensor

__all__ = ["fuse", "fusing_converters"]

_NUMBERS = re.compile(r"\d+")


def fusing_converters(transforms: Iterable[Any]) -> list[Any]:
    """Those converters of transformers' mapping that stack tensors, and may put several stacks below one another."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    def fuses(transform: Any) -> bool:
        if not isinstance(transform, WeightConverter) or len(transform.target_patterns) != 1:
            return False
        stack, *rest = transform.operations
        below = not rest or (len(rest) == 1 and isinstance(rest[0], Concatenate) and rest[0].dim == 1)
        return isinstance(stack, MergeModulelist) and stack.dim == 0 and below

    return [transform for transform in transforms if fuses(transform)]


def fuse(
    tensors: Mapping[str, FolderTensor], rename: Callable[[str], tuple[str, str | None]], converters: list[Any]
) -> dict[str, FolderTensor]:
    """The tensors of a folder by the names of the model, those that the model has as one put together.

    Args:
        tensors: By their names in the folder.
        rename: Gives the model's name of a folder's name, and the pattern of the converter that matched, if one did.
        converters: From :func:`fusing_converters`.
    """
    found: dict[str, FolderTensor] = {}
    stacks: dict[str, dict[str, list[FolderTensor]]] = {}
    for name in sorted(tensors, key=_natural):
        target, pattern = rename(name)
        if pattern is None:
            found[target] = tensors[name]
        else:
            stacks.setdefault(target, {}).setdefault(pattern, []).append(tensors[name])
    order = [pattern for converter in converters for pattern in converter.source_patterns]
    for target, by_pattern in stacks.items():
        columns = [by_pattern[pattern] for pattern in sorted(by_pattern, key=order.index)]
        # Of uneven stacks some tensor is missing; what is left out here is reported as missing there.
        if len({len(column) for column in columns}) == 1 and _fit(columns):
            found[target] = _fused(columns)
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if _NUMBERS.fullmatch(part) else (1, 0, part) for part in name.split(".")]


def _fit(columns: list[list[FolderTensor]]) -> bool:
    """Whether each stack has one shape, and all have the same shape but for the first dimension."""
    shapes = [{tensor.shape for tensor in column} for column in columns]
    return all(len(one) == 1 for one in shapes) and len({next(iter(one))[1:] for one in shapes}) == 1


def _fused(columns: list[list[FolderTensor]]) -> FolderTensor:
    first = columns[0][0]
    rows = sum(column[0].shape[0] for column in columns)
    shape = (len(columns[0]), rows, *first.shape[1:])
    return FolderTensor(first.name, first.file, shape, tuple(zip(*columns, strict=True)))
