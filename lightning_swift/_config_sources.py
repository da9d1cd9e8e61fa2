"""Reads where a training command's settings come from: YAML files and command-line options. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_swift._config_check import Source
from lightning_swift._shipped import find_config
from lightning_swift.errors import ConfigurationError

__all__ = ["Sources", "read_sources"]

_CONFIG = ("--config", "-c")
_INLINE = "command line"


@dataclass(frozen=True)
class Sources:
    """Everything a training command was told.

    Args:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        arguments: The command line, with names of recipes replaced by their paths.
        values: Each file and option as nested mappings, in the order of the command line.
        merged: All of them together, later ones winning.
    """

    command: str
    arguments: list[str]
    values: list[tuple[Mapping[str, Any], Source]]
    merged: Mapping[str, Any]


def read_sources(arguments: Sequence[str]) -> Sources:
    """Read the files that ``arguments`` (sub-command first) name.

    Raises:
        ConfigurationError: A file is not there, is not YAML, or names a key twice.
    """
    completed = [arguments[0]]
    values: list[tuple[Mapping[str, Any], Source]] = []
    appended: dict[str, str] = {}
    for option, value, written in _options(arguments[1:]):
        if option in _CONFIG and value is not None:
            path = find_config(value)
            completed += ["--config", str(path)]
            values.append(_read_file(path))
        else:
            completed += written
            if option is not None:
                values.append((_of_the_appended(option, value, appended), Source(_INLINE, shorthand=True)))
    merged: dict[str, Any] = {}
    for settings, _ in values:
        merged = _merge(merged, settings)
    return Sources(arguments[0], completed, values, merged)


def _options(arguments: Sequence[str]) -> Iterator[tuple[str | None, str | None, list[str]]]:
    """Name, value and original words of each option; ``(None, None, words)`` for anything else."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        name, equals, value = word.partition("=")
        is_option = word in _CONFIG or (word.startswith("--") and len(word) > 2)
        if is_option and equals:
            yield name, value, [word]
        elif is_option and position + 1 < len(arguments) and not arguments[position + 1].startswith("--"):
            position += 1
            yield word, arguments[position], [word, arguments[position]]
        elif is_option:
            yield word, None, [word]
        else:
            yield None, None, [word]
        position += 1


def _read_file(path: Path) -> tuple[Mapping[str, Any], Source]:
    lines: dict[tuple[str, ...], int] = {}
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _record_lines(node, (), str(path), lines)
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"not valid YAML: {error}", where=str(path)) from error
    if not isinstance(values, Mapping):
        raise ConfigurationError("holds no settings.", where=str(path), fix="See the shipped recipes for examples.")
    return values, Source(str(path), lines)


def _record_lines(node: yaml.Node, path: tuple[str, ...], name: str, lines: dict[tuple[str, ...], int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                # YAML readers keep the last one silently.
                raise ConfigurationError(
                    f"{key.value!r} stands there twice, first in line {lines[here]}.",
                    where=f"{name}:{line}",
                    fix="Keep one.",
                )
            lines[here] = line
            _record_lines(value, here, name, lines)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _record_lines(item, (*path, str(index)), name, lines)


def _nested(option: str, value: str | None) -> dict[str, Any]:
    try:
        inner: Any = None if value is None else yaml.safe_load(value)
    except yaml.YAMLError:
        inner = value
    # `--trainer.callbacks+ NAME` appends to a list.
    for key in reversed(option.rstrip("+").split(".")):
        inner = {key: inner}
    return {str(key): item for key, item in inner.items()}


def _of_the_appended(option: str, value: str | None, appended: dict[str, str]) -> dict[str, Any]:
    """In `--callbacks+ A --callbacks.x 1 --callbacks+ B`, x belongs to A, of which merging would leave nothing."""
    name = option.removeprefix("--")
    settings = _nested(name, value)
    for place in [place for place in appended if name.startswith(f"{place}.")]:
        _inner(settings, place).setdefault("class_path", appended[place])
    if name.endswith("+"):
        place = name.rstrip("+")
        item = _inner(settings, place)
        class_path = item.get("class_path") if isinstance(item, Mapping) else item
        appended.pop(place, None)
        if isinstance(class_path, str):
            appended[place] = class_path
    return settings


def _inner(settings: Mapping[str, Any], place: str) -> Any:
    inner: Any = settings
    for key in place.split("."):
        inner = inner[key]
    return inner


def _merge(old: Any, new: Any) -> Any:
    if isinstance(new, Mapping) and isinstance(old, str):
        # `--model CausalLM --model.lr 1`
        old = {"class_path": old}
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {**old, **{key: _merge(old[key], value) if key in old else value for key, value in new.items()}}
    return new
