"""Learnable parts of a sharded block that the plan does not name are exact or refused, never silently wrong."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_swift.errors import ModelError
from lightning_swift.parallel.tensor import TensorParallelSettings
from tests.harness.ranks import ranks
from tests.tensor.cases import batch, compare, cut, maker, tp_mesh
from tests.tensor.parts import changed

SEQUENCE = TensorParallelSettings(sequence_parallel=True)
HEADS = "model.layers.*.mlp.act_fn.scale"


@ranks(2)
def check_exact(settings: TensorParallelSettings) -> None:
    batches = [batch(), batch(seed=4)]
    sequence = settings.sequence_parallel
    # A learnable activation function between the two cut layers: its gradient is a part of the sum.
    report = compare(partial(changed, "prelu"), settings, batches=batches)
    assert {f"model.layers.{i}.mlp.act_fn.weight" for i in (0, 1)} <= set(report.partial)
    # A bias of a row-cut layer is added once, after the sum. A norm before the column cut sees whole activations.
    compare(partial(changed, "bias"), settings, batches=batches)
    report = compare(partial(changed, "normed"), settings, batches=batches)
    assert not any("mlp.norm" in name for name in report.partial)
    # One number for each head: named in the plan it is cut with the heads.
    named = TensorParallelSettings(sequence_parallel=sequence, plan={HEADS: "shard"})
    report = compare(partial(changed, "heads"), named, batches=batches)
    assert {f"model.layers.{i}.mlp.act_fn.scale" for i in (0, 1)} <= set(report.sharded)
    compare(partial(changed, "features"), named, batches=batches)


def test_exact() -> None:
    check_exact(TensorParallelSettings())


def test_exact_under_sequence_parallelism() -> None:
    check_exact(SEQUENCE)


@ranks(2)
def check_refused(settings: TensorParallelSettings) -> None:
    mesh = tp_mesh()
    with pytest.raises(ModelError, match=r"model\.layers\.0: .* cannot run"):
        cut(changed("heads"), mesh, settings)
    with pytest.raises(ModelError, match=r"model\.layers\.0: .* cannot run"):
        cut(changed("features"), mesh, settings)
    with pytest.raises(ModelError, match="computes something else"):
        cut(changed("across"), mesh, settings)
    swapped = {"model.layers.*.mlp.gate_proj": "colwise_gather_output"}
    with pytest.raises(ModelError, match=r"cannot run|computes something else"):
        cut(maker("llama")(), mesh, TensorParallelSettings(plan=swapped))
    if not settings.sequence_parallel:
        with pytest.raises(ModelError, match=r"neither whole nor a part of a sum \(mlp\.scale\)"):
            cut(changed("twice"), mesh, settings)
    blind = TensorParallelSettings(sequence_parallel=settings.sequence_parallel, self_check=False)
    with pytest.raises(ModelError, match=r"nothing says .* mlp\.act_fn\.weight are partial"):
        cut(changed("prelu"), mesh, blind)


def test_refused() -> None:
    check_refused(TensorParallelSettings())


def test_refused_under_sequence_parallelism() -> None:
    check_refused(SEQUENCE)
