"""Which modules are a model's repeated blocks, its embedding and its head. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

__all__ = ["class_names", "find_blocks", "find_embeddings", "is_separable"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks below ``model``, in the order of the model, never one inside another.

    A Hugging Face model names its block classes in ``_no_split_modules``. In any other module the blocks are the
    members of one class that a ``ModuleList``, ``ModuleDict`` or ``Sequential`` holds more than once; where there are
    such members that are made of parts with parameters of their own, single layers do not count.

    Returns:
        Pairs of the name relative to ``model`` and the module; empty if there is no repetition.
    """
    named = _outermost(_named_by_model(model))
    repeated = _outermost(_repeated(model, composite=True)) or _outermost(_repeated(model, composite=False))
    if not named:
        return repeated
    # A module may hold a Hugging Face model next to blocks of its own.
    inside = [name for name, module in model.named_modules() if _block_classes(module)]
    return _in_order(model, [*named, *(pair for pair in repeated if not _is_below(pair[0], inside))])


def find_embeddings(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Input embedding and output head of the outermost Hugging Face models below ``model``, as those declare them.

    Returns:
        Pairs of the module and whether it is a head.
    """
    found: list[tuple[nn.Module, bool]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if not _block_classes(module) or not hasattr(module, "get_input_embeddings") or _is_below(name, inside):
            continue
        inside.append(name)
        for part, is_head in ((module.get_input_embeddings(), False), (module.get_output_embeddings(), True)):
            if isinstance(part, nn.Module) and all(part is not other for other, _ in found):
                found.append((part, is_head))
    return found


def is_separable(owner: nn.Module, root: nn.Module, *, besides: Iterable[nn.Module] = ()) -> bool:
    """Whether no parameter of ``owner`` can be reached from ``root`` except through ``owner``.

    A tied weight, or a layer that two blocks share, must belong to a group that holds all of its users.

    Args:
        owner: The module that is to be a group.
        root: The module that holds everything.
        besides: Modules whose parameters do not count, such as second names of parts of ``owner``.
    """
    own = {id(parameter) for parameter in owner.parameters()}
    seen = {id(module) for module in (owner, *besides)}
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if any(id(parameter) in own for parameter in module._parameters.values()):
            return False
        pending.extend(module.children())
    return True


def class_names(module: nn.Module) -> set[str]:
    """Names of the class of ``module`` and its bases: ``fully_shard`` puts a class of its own before the original."""
    return {kind.__name__ for kind in type(module).__mro__} - {"Module", "object"}


def _block_classes(module: nn.Module) -> set[str]:
    return set(getattr(module, "_no_split_modules", None) or ())


def _named_by_model(model: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {name for module in model.modules() for name in _block_classes(module)}
    matches = [(name, module) for name, module in model.named_modules() if name and class_names(module) & names]
    # Some models also list single parts there, such as an embedding, which must stay on one device.
    members = {
        id(child) for module in model.modules() if isinstance(module, _CONTAINERS) for child in module.children()
    }
    return [pair for pair in matches if id(pair[1]) in members] or matches


def _repeated(model: nn.Module, *, composite: bool) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for prefix, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        members = [(name, child) for name, child in container.named_children() if _counts(child, composite=composite)]
        frequent = Counter(type(child) for _, child in members)
        found += [(f"{prefix}.{name}" if prefix else name, c) for name, c in members if frequent[type(c)] > 1]
    return found


def _counts(module: nn.Module, *, composite: bool) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or next(module.parameters(), None) is None:
        return False
    return not composite or any(next(child.parameters(), None) is not None for child in module.children())


def _outermost(pairs: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    names = [name for name, _ in pairs]
    return [(name, module) for name, module in pairs if not _is_below(name, names)]


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(name != other and (other == "" or name.startswith(f"{other}.")) for other in others)


def _in_order(model: nn.Module, pairs: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    place = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return sorted(pairs, key=lambda pair: place[pair[0]])
