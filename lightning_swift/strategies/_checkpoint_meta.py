"""What goes into ``meta.pt``: types that can be read back without running code, checked when they are saved.

A checkpoint that cannot be read safely is worth nothing, and the time to say so is before the training has gone on.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import io
import os
import pickle
import types
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from lightning_swift.errors import UnsafeCheckpointError

__all__ = ["readable_meta"]

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# Names of classes; reading them back would need the class, and nothing here does.
_TYPES = ("hparams_type", "datamodule_hparams_type")


class _NotPlainError(TypeError):
    """A hyper-parameter that is neither plain data nor known to be convertible."""


def readable_meta(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """``checkpoint`` as it can be read back by ``torch.load(weights_only=True)``.

    Hyper-parameters are turned into plain data (paths to strings, enums to their values, dataclasses and namespaces
    to dicts); one that cannot be is left out with a warning that names it.

    Raises:
        UnsafeCheckpointError: Any other state is of a type that cannot be read back safely.
    """
    meta = {key: value for key, value in checkpoint.items() if key not in _TYPES}
    for section in _HYPER_PARAMETERS:
        if isinstance(meta.get(section), Mapping):
            meta[section] = _plain_parameters(meta[section])
    if _is_readable(meta):
        return meta
    place, value = _first_unreadable(meta)
    raise UnsafeCheckpointError(
        f"the checkpoint would hold a {type(value).__module__}.{type(value).__qualname__}, which cannot be read back "
        "without running code.",
        where=place,
        fix="Keep plain data there (numbers, strings, tensors, lists, dicts), or allow the type with "
        "torch.serialization.add_safe_globals in the script that trains and in every one that reads.",
    )


def _plain_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in parameters.items():
        try:
            kept[str(name)] = _plain(value)
        except _NotPlainError as error:
            warnings.warn(
                f"The hyper-parameter {name!r} is left out of checkpoints: {error}. "
                f"Call self.save_hyperparameters(ignore=[{name!r}]) to say so yourself.",
                stacklevel=2,
            )
    return kept


def _plain(value: Any) -> Any:
    converted = _converted(value)
    if isinstance(converted, Mapping):
        return {key if isinstance(key, int) else str(key): _plain(item) for key, item in converted.items()}
    if isinstance(converted, list | tuple | set | frozenset):
        items = [_plain(item) for item in converted]
        return items if isinstance(converted, list) else tuple(items) if isinstance(converted, tuple) else set(items)
    if not _is_readable(converted):
        raise _NotPlainError(f"a {type(value).__module__}.{type(value).__qualname__} is not plain data")
    return converted


def _converted(value: Any) -> Any:
    """One step towards plain data, for the types that are known to stand for it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace | types.SimpleNamespace) or type(value).__name__ == "Namespace":
        return dict(vars(value))
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _is_readable(value: Any) -> bool:
    if value is None or type(value) in {bool, int, float, str}:
        return True
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, map_location="cpu", weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError):
        # The last two are what pickle raises on lambdas, locks, modules and the like.
        return False
    return True


def _first_unreadable(value: Any, place: str = "") -> tuple[str, Any]:
    """Path and value of the innermost object that cannot be read back."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{place}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    for where, item in items:
        if not _is_readable(item):
            return _first_unreadable(item, where)
    return f"checkpoint{place}", value
