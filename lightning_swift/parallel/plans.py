"""Tensor-parallel plans: the one a model publishes, the user's changes to it, and what each style means here.

A plan says of module names (``*`` stands for one number or name between dots) how their weights are cut. transformers
publishes one for most architectures (``model.tp_plan``). Nothing here communicates or changes a model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn

from lightning_swift.errors import ConfigurationError, ModelError

__all__ = ["STYLES", "Cut", "Planned", "Style", "base_layer", "inner_model", "read_plan"]


class Cut(StrEnum):
    """Which way a module is cut."""

    COLUMNS = "columns"
    ROWS = "rows"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    PARAMETER = "parameter"
    SUM_GRADIENT = "sum_gradient"
    NOT_CUT = "not_cut"


@dataclass(frozen=True)
class Style:
    """What a style of a plan means.

    Args:
        cut: Which way the weights are cut.
        whole: Whether the activation between the two cut layers of a block is whole on every rank: the output of a
            column cut is gathered, the input of a row cut is split.
    """

    cut: Cut
    whole: bool = False


#: Styles of plans by the names that transformers uses, and two of this package: ``shard`` cuts a parameter along its
#: first dimension, ``replicate`` takes a module out of the plan.
STYLES: Mapping[str, Style] = {
    "colwise": Style(Cut.COLUMNS),
    "colwise_gather_output": Style(Cut.COLUMNS, whole=True),
    "colwise_rep": Style(Cut.COLUMNS, whole=True),
    "rowwise": Style(Cut.ROWS),
    "rowwise_split_input": Style(Cut.ROWS, whole=True),
    "rowwise_rep": Style(Cut.ROWS, whole=True),
    "embedding_rowwise": Style(Cut.VOCABULARY),
    "moe_tp_experts": Style(Cut.EXPERTS),
    "replicated_with_grad_allreduce": Style(Cut.SUM_GRADIENT),
    "shard": Style(Cut.PARAMETER),
    "replicate": Style(Cut.NOT_CUT),
}

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Planned:
    """One module or parameter of a model and the style that a plan gives it.

    Args:
        name: Its name in the Hugging Face model.
        style: Key of :data:`STYLES`.
        by_user: Whether the user's plan says so.
    """

    name: str
    style: str
    by_user: bool = False

    @property
    def meaning(self) -> Style:
        """What the style means."""
        return STYLES[self.style]


def inner_model(model: nn.Module) -> Any:
    """The Hugging Face model itself, without peft's wrapper around it."""
    get_base_model = getattr(model, "get_base_model", None)
    return model if get_base_model is None else get_base_model()


def base_layer(module: nn.Module) -> nn.Module:
    """The layer that an adapter wraps, or ``module`` itself."""
    inner = getattr(module, "base_layer", None)
    return base_layer(inner) if isinstance(inner, nn.Module) else module


def read_plan(model: nn.Module, user: Mapping[str, str] | None = None) -> list[Planned]:
    """The plan of ``model`` by full names: what the model publishes, with the user's entries added or put in place.

    Where patterns of the user's overlap, the longest one that matches a name decides.

    Args:
        model: A Hugging Face model, split into stages or not, with or without peft.
        user: Patterns and styles, such as ``{"model.layers.*.mlp.up_proj": "colwise"}``.

    Raises:
        ModelError: The published plan has a style that is not supported here.
    """
    inner = inner_model(model)
    published: Mapping[str, str] = getattr(inner, "tp_plan", None) or {}
    names = _names(inner)
    entries: dict[str, Planned] = {}
    for name in names:
        if (style := published.get(_NUMBER.sub("*", name), published.get(name))) is not None:
            entries[name] = Planned(name, style)
    patterns = {pattern: _compiled(pattern) for pattern in sorted(user or {}, key=len)}
    for pattern, expression in patterns.items():
        for name in filter(expression.fullmatch, names):
            entries[name] = Planned(name, (user or {})[pattern], by_user=True)
    return [entry for entry in _without_parts(list(entries.values())) if _known(entry, inner)]


def check_user_plan(model: nn.Module, user: Mapping[str, str]) -> None:
    """Refuse unknown styles and patterns that match nothing.

    Raises:
        ConfigurationError: A style is unknown, or a pattern matches no module or parameter of ``model``.
    """
    names = _names(inner_model(model))
    for pattern, style in user.items():
        if style not in STYLES:
            near = difflib.get_close_matches(str(style), STYLES, n=1)
            raise ConfigurationError(
                f"style {style!r} of {pattern!r} is unknown.",
                where="tp_plan",
                fix=f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(STYLES)}.",
            )
        if not any(map(_compiled(pattern).fullmatch, names)):
            known = {_NUMBER.sub("*", name) for name in names}
            near = difflib.get_close_matches(pattern, known, n=1)
            raise ConfigurationError(
                f"pattern {pattern!r} matches no module or parameter of {type(inner_model(model)).__name__}.",
                where="tp_plan",
                fix=f"Did you mean {near[0]!r}?"
                if near
                else "Use names of model.named_modules(), with * for a number.",
            )


def _names(model: nn.Module) -> list[str]:
    # The layers inside peft's wrappers are found through the wrapper's own name.
    found = [name for name, _ in model.named_modules() if name]
    found += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [name for name in found if not _ADAPTER_PARTS.search(name)]


_ADAPTER_PARTS = re.compile(r"\.(?:base_layer|lora_\w+)(?:\.|$)")


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))


def _without_parts(entries: list[Planned]) -> list[Planned]:
    """Without the parameters of modules that are planned themselves, such as fused experts: that says it all."""
    modules = {entry.name for entry in entries}
    return [entry for entry in entries if entry.by_user or entry.name.rpartition(".")[0] not in modules]


def _known(entry: Planned, model: nn.Module) -> bool:
    if entry.style in STYLES:
        return entry.meaning.cut is not Cut.NOT_CUT
    raise ModelError(
        f"the plan that {type(model).__name__} publishes has the style {entry.style!r}, which is not supported.",
        where=entry.name,
        fix="Give it another one by tp_plan, such as 'replicate', together with the layers that it is paired with, or "
        "use tensor_parallel_size=1.",
    )


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """The module called ``name``, or None where that is a parameter or belongs to another stage."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Names for an error message, the first ``limit`` of them."""
    every = list(names)
    more = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + more
