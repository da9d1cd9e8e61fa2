"""Refuses unknown keys and classes in recipes and options, naming the nearest valid one and where it was found.

jsonargparse refuses most of them too, but accepts an unknown section that is empty, and answers with pages that name
no alternative. This runs before it, walking every YAML file and command-line option beside the signatures that the
values are meant for. What it cannot judge (types of values, say) is left to jsonargparse.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from lightning_swift._shipped import nearest
from lightning_swift._signatures import (
    ANYTHING,
    Hint,
    class_bases,
    item_hints,
    known_classes,
    members,
    parameters,
    record,
)
from lightning_swift.errors import ConfigurationError

__all__ = ["Checker", "Source"]

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_MISSING: Any = object()
# Anything else in the place of a class is a file, which jsonargparse reads.
_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*(?<!\.yaml)(?<!\.yml)(?<!\.json)")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Args:
        name: The file, or ``"command line"``.
        lines: Line number of each key, by its path; empty for the command line.
        shorthand: Whether a class's arguments may stand beside ``class_path`` (``--model.lr 1``).
    """

    name: str
    lines: Mapping[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    shorthand: bool = False

    def at(self, path: tuple[str, ...]) -> str:
        """``file:line`` of the key at ``path``."""
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"


class Checker:
    """Checks values against a tree of valid keys.

    Args:
        tree: Valid keys; a leaf holds the type hint of its value.
        context: All sources merged, the last one winning: where ``init_args`` without a ``class_path`` find theirs.
    """

    def __init__(self, tree: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        self._tree = tree
        self._context = context

    def check(self, values: Mapping[str, Any], source: Source) -> None:
        """Check one file or command line.

        Raises:
            ConfigurationError: An unknown key or class; the nearest valid one is named.
        """
        self._section(values, self._tree, (), source)

    def _section(self, value: Any, tree: Mapping[str, Any], path: tuple[str, ...], source: Source) -> None:
        if not isinstance(value, Mapping):
            return
        for key, item in value.items():
            here = (*path, str(key))
            if key not in tree:
                raise _unknown_key(str(key), tree, path, source.at(here))
            if isinstance(tree[key], Mapping):
                self._section(item, tree[key], here, source)
            else:
                self._value(item, tree[key], here, source)

    def _value(self, value: Any, hint: Hint, path: tuple[str, ...], source: Source) -> None:
        if isinstance(value, list):
            for index, item in enumerate(value):
                for inner in item_hints(hint):
                    self._value(item, inner, (*path, str(index)), source)
            return
        bases = class_bases(hint)
        if isinstance(value, Mapping):
            fields = record(hint)
            if bases:
                self._class(value, bases, path, source)
            elif fields is not None:
                self._section(value, fields, path, source)
        elif isinstance(value, str) and bases and not _accepts_text(hint) and _PATH.fullmatch(value):
            _find_class(value, bases, source.at(path))

    def _class(self, value: Mapping[str, Any], bases: Sequence[type], path: tuple[str, ...], source: Source) -> None:
        class_path = value.get("class_path", _class_path_of(self._lookup(path)))
        cls = _find_class(class_path, bases, source.at((*path, "class_path"))) if isinstance(class_path, str) else None
        arguments = parameters(cls) if cls is not None else None
        valid = dict.fromkeys(_CLASS_KEYS, ANYTHING)
        if source.shorthand and arguments is not None:
            valid |= arguments
        for key, item in value.items():
            here = (*path, str(key))
            if key not in valid and not (source.shorthand and (cls is None or key == "help")):
                raise _unknown_key(str(key), valid, path, source.at(here))
            if key == "init_args" and arguments is not None:
                self._section(item, arguments, here, source)
            elif key not in _CLASS_KEYS and arguments is not None:
                self._value(item, arguments.get(key, ANYTHING), here, source)

    def _lookup(self, path: tuple[str, ...]) -> Any:
        value: Any = self._context
        for key in path:
            if isinstance(value, Mapping):
                value = value.get(key, _MISSING)
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                return _MISSING
        return value


def _class_path_of(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    found = value.get("class_path") if isinstance(value, Mapping) else None
    return found if isinstance(found, str) else None


def _accepts_text(hint: Hint) -> bool:
    return str in members(hint)


def _find_class(class_path: str, bases: Sequence[type], where: str) -> type | None:
    known = known_classes(bases)
    if "." not in class_path:
        if class_path in {name.rpartition(".")[2] for name in known}:
            return next(cls for name, cls in known.items() if name.rpartition(".")[2] == class_path)
        raise _unknown_class(class_path, [name.rpartition(".")[2] for name in known], where)
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise _unknown_class(class_path, known, where) from error
    if not isinstance(found, type):
        return None  # a function that returns an instance, which jsonargparse accepts
    if not issubclass(found, tuple(bases)):
        expected = " or ".join(base.__name__ for base in bases)
        raise ConfigurationError(
            f"{class_path!r} is not a {expected}.",
            where=where,
            fix=f"The nearest valid class is {nearest(class_path, known)!r}.",
        )
    return found


def _unknown_class(class_path: str, valid: Any, where: str) -> ConfigurationError:
    names = list(valid)
    fix = f"The nearest valid class is {nearest(class_path, names)!r}." if names else None
    return ConfigurationError(f"there is no class {class_path!r}.", where=where, fix=fix)


def _unknown_key(key: str, valid: Mapping[str, Any], path: tuple[str, ...], where: str) -> ConfigurationError:
    section = f" in {'.'.join(path)!r}" if path else ""
    fix = f"The nearest valid key is {nearest(key, valid)!r}." if valid else "No key is valid there."
    return ConfigurationError(f"unknown key {key!r}{section}.", where=where, fix=fix)
