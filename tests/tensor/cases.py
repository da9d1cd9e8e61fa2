"""One training step of a tiny model, in a single process and cut over ranks, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_swift.parallel.tensor import (
    TensorParallelReport,
    TensorParallelSettings,
    apply_tensor_parallel,
    check_tensor_parallel,
    partial_parameters,
    sum_partial_gradients,
    tensor_parallel_context,
)
from tests.harness.models import VOCAB, tiny_model

__all__ = ["GRADIENT", "LOSS", "batch", "compare", "cut", "gradients", "relative", "step", "tp_mesh"]

# The loss is a mean of a few dozen float32 terms near 5: an error of one unit in the last place is 5e-7.
LOSS = 1e-6
# Relative to the largest element of the gradient: the ranks add in another order, which gives 5e-7 to 2e-6.
GRADIENT = 1e-5


def tp_mesh(size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def batch(rows: int = 2, length: int = 16, seed: int = 3, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Random tokens, the end of the last row padded and without labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[-1, -3:], labels[-1, -3:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: Any, batches: list[dict[str, Tensor]], settings: TensorParallelSettings | None = None) -> float:
    """Forward and backward of each batch, gradients accumulated; the last loss."""
    loss = torch.zeros(())
    for one in batches:
        with tensor_parallel_context(settings or TensorParallelSettings()):
            loss = model(**one, use_cache=False).loss
            loss.backward()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def gradients(model: Any) -> dict[str, Tensor]:
    """Whole gradients by name; a collective."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def normalise(model: Any) -> list[tuple[Any, Tensor]]:
    """Bring gradients into the placements of their parameters, as the pipelined model does."""
    pairs = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            if isinstance(parameter.grad, DTensor) and parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
            pairs.append((parameter, parameter.grad))
    return pairs


def cut(model: Any, mesh: DeviceMesh, settings: TensorParallelSettings | None = None) -> TensorParallelReport:
    settings = settings or TensorParallelSettings()
    check_tensor_parallel(model, mesh.size(), settings)
    return apply_tensor_parallel(model, mesh, settings)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) / max(float(expected.abs().max()), 1e-12)


def zeros(expected: dict[str, Tensor], found: dict[str, Tensor]) -> set[str]:
    """Gradients that are the rounding of zero in both, such as those of the biases of attention keys."""
    limit = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.values())
    return {n for n in expected if max(float(expected[n].abs().max()), float(found[n].abs().max())) < limit}


def compare(
    make: Callable[[], Any],
    settings: TensorParallelSettings | None = None,
    *,
    batches: list[dict[str, Tensor]] | None = None,
    size: int = 2,
    after: Callable[[Any], None] | None = None,
) -> TensorParallelReport:
    """Loss and every gradient of ``make()`` cut over ``size`` ranks are those of the whole model."""
    settings, batches = settings or TensorParallelSettings(), batches or [batch()]
    whole = make()
    expected_loss = step(whole, batches)
    expected = gradients(whole)
    mesh = tp_mesh(size)
    model = make()
    report = cut(model, mesh, settings)
    if after is not None:
        after(model)
    loss = step(model, batches, settings)
    sum_partial_gradients(normalise(model), partial_parameters(model, report), mesh.get_group())
    found = gradients(model)
    assert abs(loss - expected_loss) < LOSS, (loss, expected_loss)
    assert sorted(found) == sorted(expected)
    errors = {name: relative(found[name], expected[name]) for name in expected if name not in zeros(expected, found)}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < GRADIENT, (worst, errors[worst], report.partial)
    # The whole gradients are the same on all ranks only if no rank has kept a part.
    check = torch.stack([gradient.double().abs().sum() for gradient in found.values()])
    first = check.clone()
    dist.broadcast(first, 0)
    assert torch.allclose(check, first, rtol=1e-6)
    return report


def maker(kind: str, *, layers: int = 2, **kwargs: Any) -> Callable[[], Any]:
    """A model in training mode, the same on every rank and at every call."""

    def make() -> Any:
        return tiny_model(kind, layers=layers, **kwargs).train()

    return make
