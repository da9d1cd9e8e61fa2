"""How many layers each pipeline stage gets, so that all of them take about the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.anatomy import Anatomy, pretrained_inside

__all__ = ["Balance", "balance", "stage_shares"]

Balance = Literal["auto"] | list[int]

Bounds = list[tuple[int, int]]


def balance(model: nn.Module, anatomy: Anatomy, n_stages: int, balance: Balance = "auto") -> Bounds:
    """First and last (exclusive) layer of each stage.

    ``"auto"`` makes the most expensive stage as cheap as possible. The cost of a part is the number of parameters that
    a token is multiplied with: all of a layer, of its experts those that a token is sent to, and of the head; of an
    embedding the one row that is looked up.

    Args:
        model: The whole model, on any device.
        anatomy: What :func:`~lightning_swift.parallel.anatomy.probe` says about it.
        n_stages: Stages of all ranks together.
        balance: ``"auto"``, or the number of layers of each stage.

    Raises:
        ConfigurationError: Numbers that do not fit the model.
        ModelError: Fewer layers than stages.
    """
    if n_stages > anatomy.n_layers:
        raise ModelError(
            f"{anatomy.n_layers} layers cannot fill {n_stages} pipeline stages.",
            where=type(pretrained_inside(model)).__name__,
            fix="Use fewer pipeline ranks or virtual stages.",
        )
    if isinstance(balance, str):
        return _cheapest(_costs(model, anatomy), n_stages)
    if len(balance) != n_stages or sum(balance) != anatomy.n_layers or min(balance) < 1:
        raise ConfigurationError(
            f"{balance} does not give {anatomy.n_layers} layers to {n_stages} stages.",
            where="stage_balance",
            fix='Give a number of layers of at least 1 for every stage, virtual ones too, or "auto".',
        )
    return _bounds(balance)


def stage_shares(model: nn.Module, anatomy: Anatomy, bounds: Bounds) -> list[float]:
    """Share of each stage in the estimated cost of ``model``, which is still whole; they add up to 1."""
    costs = _costs(model, anatomy)
    total = sum(costs)
    return [sum(costs[start:end]) / total for start, end in bounds]


def _costs(model: nn.Module, anatomy: Anatomy) -> list[float]:
    """Of each layer; the first and last with what comes before and after."""
    pretrained = pretrained_inside(model)
    used = _share_of_experts(pretrained.config.get_text_config())
    costs = [_cost(layer, used) for layer in pretrained.get_submodule(anatomy.layers)]
    parts = [(0, name) for name in anatomy.before] + [(-1, name) for name in anatomy.after]
    for place, name in parts:
        module = pretrained.get_submodule(name)
        lookup = place == 0 and isinstance(module, nn.Embedding)
        costs[place] += anatomy.hidden_size if lookup else _cost(module, used)
    return costs


def _cost(module: nn.Module, share_of_experts: float) -> float:
    return sum(p.numel() * (share_of_experts if "experts." in name else 1.0) for name, p in module.named_parameters())


def _share_of_experts(config: Any) -> float:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), 1)
    return min(1.0, (getattr(config, "num_experts_per_tok", None) or experts) / experts)


def _cheapest(costs: Sequence[float], n_stages: int) -> Bounds:
    """Contiguous parts of which the largest is as small as possible, and among those the most even ones."""
    n = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: the largest part, the sum of squares, and the sizes, for layers before end in the parts so far.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(1, n_stages + 1):
        best = {
            end: min(
                (
                    max(best[start][0], total[end] - total[start]),
                    best[start][1] + (total[end] - total[start]) ** 2,
                    [*best[start][2], end - start],
                )
                for start in range(stage - 1, end)
                if start in best
            )
            for end in range(stage, n - n_stages + stage + 1)
        }
    return _bounds(best[n][2])


def _bounds(sizes: Sequence[int]) -> Bounds:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
