"""What a class accepts in a recipe: its constructor's arguments and what their type hints allow."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["ANYTHING", "Hint", "class_bases", "item_hints", "known_classes", "members", "parameters", "record"]

Hint = Any
ANYTHING: Hint = Any

_PLAIN = (bool, int, float, complex, str, bytes, dict, list, tuple, set, frozenset, type(None), type)
# Where the classes that recipes name are imported from, shorter than where they are defined.
_PUBLIC = ("lightning_swift", "lightning_swift.callbacks", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")


def members(hint: Hint) -> list[Hint]:
    """The alternatives of a union (``A | B``, ``Optional[A]``), or the hint alone; ``Annotated`` is looked through."""
    origin: Any = typing.get_origin(hint)
    if origin is typing.Annotated:
        return members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in members(member)]
    return [hint]


def item_hints(hint: Hint) -> list[Hint]:
    """Hints of the items where the value is a list."""
    found: list[Hint] = []
    for member in members(hint):
        origin: Any = typing.get_origin(member)
        if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
            found += [argument for argument in typing.get_args(member) if argument is not Ellipsis]
    return found


def class_bases(hint: Hint) -> list[type]:
    """Classes that are given as ``class_path`` and ``init_args``, any subclass being welcome.

    Empty where a mapping of any content is allowed too: it could not be told apart.
    """
    if _accepts_any_mapping(hint):
        return []
    return [
        member
        for member in members(hint)
        if isinstance(member, type)
        and not issubclass(member, (*_PLAIN, enum.Enum))
        and not dataclasses.is_dataclass(member)
        and member.__module__ != "pathlib"
    ]


def record(hint: Hint) -> dict[str, Hint] | None:
    """Fields of a dataclass that is given as a plain mapping, or None where the hint is something else."""
    if _accepts_any_mapping(hint):
        return None
    for member in members(hint):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return parameters(member)
    return None


def _accepts_any_mapping(hint: Hint) -> bool:
    kinds: list[Any] = [*members(hint), *map(typing.get_origin, members(hint))]
    return any(kind is Any or (isinstance(kind, type) and issubclass(kind, Mapping)) for kind in kinds)


def parameters(cls: type) -> dict[str, Hint] | None:
    """Arguments of the constructor with their hints; None when any name is accepted.

    ``**kwargs`` are taken to be handed on to the next class in line.
    """
    found: dict[str, Hint] = {}
    hands_on = False
    for ancestor in cls.__mro__[:-1]:
        if "__init__" in vars(ancestor):
            own, hands_on = _own_parameters(ancestor)
            found = {**own, **found}
            if not hands_on:
                break
    return None if hands_on else found


def _own_parameters(cls: type) -> tuple[dict[str, Hint], bool]:
    constructor = vars(cls)["__init__"]
    signature = inspect.signature(constructor)
    try:
        hints = typing.get_type_hints(constructor)
    except (NameError, TypeError):
        # Names imported for type checkers only: the arguments are known all the same, what they allow is not.
        hints = {}
    own = {
        name: hints.get(name, ANYTHING)
        for name, parameter in list(signature.parameters.items())[1:]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    return own, hands_on


def known_classes(bases: Sequence[type]) -> Mapping[str, type]:
    """Every loaded subclass of ``bases`` that can be instantiated, by the path users would write."""
    public = {value: f"{name}.{key}" for name in reversed(_PUBLIC) for key, value in _exported(name)}
    found = {cls for base in bases for cls in _subclasses(base)}
    return {
        public.get(cls, f"{cls.__module__}.{cls.__qualname__}"): cls
        for cls in found
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_")
    }


def _exported(module: str) -> Iterator[tuple[str, type]]:
    loaded = import_module(module)
    for name in loaded.__all__:
        value = getattr(loaded, name)
        if isinstance(value, type):
            yield name, value


def _subclasses(cls: type) -> Iterator[type]:
    yield cls
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield from _subclasses(child)
