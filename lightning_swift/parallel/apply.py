"""The steps between building a model and making its optimizers. ``MeshStrategy`` calls them in their order."""

from __future__ import annotations

import difflib

import torch
from torch import nn

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.blocks import class_names, find_blocks

__all__ = ["check_backend", "choose_blocks", "compile_blocks"]


def choose_blocks(module: nn.Module, classes: tuple[str, ...] | None) -> list[tuple[str, nn.Module]]:
    """The modules that are gathered and compiled as one, with their names: those found, or those of ``classes``.

    Raises:
        ConfigurationError: A class name that no module has.
    """
    if classes is None:
        return find_blocks(module)
    chosen = [(name, part) for name, part in module.named_modules() if name and class_names(part) & set(classes)]
    missing = set(classes) - {name for _, part in chosen for name in class_names(part)}
    if missing:
        known = sorted({type(part).__name__ for name, part in module.named_modules() if name})
        near = difflib.get_close_matches(sorted(missing)[0], known, n=1)
        raise ConfigurationError(
            f"no module of the model is a {', '.join(sorted(missing))}.",
            where="block_classes",
            fix=f"Did you mean {near[0]!r}?" if near else f"Its classes are {', '.join(known)}.",
        )
    return chosen


def compile_blocks(blocks: list[tuple[str, nn.Module]], backend: str | None) -> None:
    """Have each block compiled at its first call. In place: no parameter changes its name.

    Raises:
        ConfigurationError: A backend is asked for and there is no block to compile.
    """
    if backend is None:
        return
    if not blocks:
        raise ConfigurationError(
            f"compile={backend!r} compiles the repeated blocks of a model, and none were found.",
            where="compile",
            fix="Name the classes to compile with block_classes, or leave compile out.",
        )
    for _, block in blocks:
        block.compile(backend=backend)


def check_backend(backend: str | None) -> None:
    """Refuse a backend that torch does not have.

    Raises:
        ConfigurationError: The name is unknown.
    """
    if backend is None:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigurationError(
            f"compile={backend!r} is not a backend of torch.compile.",
            where="compile",
            fix=f"Choose one of {', '.join(known)}.",
        )
