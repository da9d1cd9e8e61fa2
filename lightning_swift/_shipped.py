"""Finds the recipes and configs that come with the package, installed or in a checkout. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_swift.errors import ConfigurationError

__all__ = ["Recipe", "find_config", "nearest", "recipes", "shipped_folder"]

_PACKAGE = Path(__file__).resolve().parent
_MEASURED = "measured:"


@dataclass(frozen=True)
class Recipe:
    """A shipped recipe.

    Args:
        name: What ``--config`` accepts.
        path: The YAML file.
        purpose: First line of the comment at its top.
        measured: Memory and time that were measured for it, or None.
    """

    name: str
    path: Path
    purpose: str
    measured: str | None


def shipped_folder(kind: str) -> Path:
    """The folder of shipped ``recipes`` or ``configs``: inside the package when installed, beside it in a checkout."""
    installed = _PACKAGE / "_shipped" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def recipes() -> list[Recipe]:
    """Every shipped recipe, by name."""
    return [_read_recipe(path) for path in sorted(shipped_folder("recipes").glob("*.yaml"))]


def find_config(value: str) -> Path:
    """The file that ``--config VALUE`` means: a path, or the name of a shipped recipe.

    Raises:
        ConfigurationError: There is neither; the nearest recipe is named.
    """
    path = Path(value)
    if path.is_file():
        return path
    # `recipes/NAME.yaml` is how a recipe is spelled in a checkout; it works outside one too.
    given = path.name.removesuffix(".yaml") if path.parent in (Path(), Path("recipes")) else value
    names = {recipe.name: recipe.path for recipe in recipes()}
    if given in names:
        return names[given]
    raise ConfigurationError(
        "neither a file nor the name of a shipped recipe.",
        where=f"--config {value}",
        fix=f"The nearest recipe is {nearest(given, names)!r}; `lightning-swift recipes` lists all of them.",
    )


def nearest(given: str, valid: Iterable[str]) -> str:
    """The entry of ``valid`` (not empty) that looks most like ``given``."""
    names = sorted(valid)
    return difflib.get_close_matches(given, names, n=1, cutoff=0.0)[0]


def _read_recipe(path: Path) -> Recipe:
    comments = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comments.append(line.removeprefix("#").strip())
    measured = [line.removeprefix(_MEASURED).strip() for line in comments if line.startswith(_MEASURED)]
    return Recipe(
        name=path.stem,
        path=path,
        purpose=comments[0] if comments else "",
        measured=measured[0] if measured else None,
    )
