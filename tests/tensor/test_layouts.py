"""Tensor parallelism together with fully_shard, lazy weights, checkpointing, compile and a plan of the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ModelError
from lightning_swift.models.lazy import lazy_pretrained, load_lazy_weights
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.parallel.gradients import total_norm
from lightning_swift.parallel.tensor import (
    TensorParallelSettings,
    apply_tensor_parallel,
    partial_parameters,
    sum_partial_gradients,
)
from tests.harness.models import save_tiny_model
from tests.harness.ranks import ranks
from tests.tensor.cases import GRADIENT, LOSS, batch, compare, cut, gradients, maker, normalise, relative, step, tp_mesh

SEQUENCE = TensorParallelSettings(sequence_parallel=True)
OPT = {
    "model.decoder.layers.*.fc1": "colwise",
    "model.decoder.layers.*.fc2": "rowwise",
    "lm_head": "colwise_gather_output",
    "model.decoder.embed_tokens": "embedding_rowwise",
}
OPT_ATTENTION = {
    **{f"model.decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.decoder.layers.*.self_attn.out_proj": "rowwise",
}


@ranks(2)
def check_user_plan() -> None:
    # Linear layers that lie on the decoder layer itself, with biases.
    report = compare(maker("opt"), TensorParallelSettings(plan=OPT), batches=[batch(), batch(seed=4)])
    assert "model.decoder.layers.0.fc1.weight" in report.sharded
    # Attention that is not cut would attend to a part of the sequence only.
    with pytest.raises(ModelError, match=r"model\.decoder\.layers\.0: .* cannot run"):
        cut(maker("opt")(), tp_mesh(), TensorParallelSettings(sequence_parallel=True, plan=OPT))
    # OPT's attention reshapes to all heads, whatever it is given: no plan makes it right.
    with pytest.raises(ModelError, match=r"model\.decoder\.layers\.0: .* cannot run"):
        cut(maker("opt")(), tp_mesh(), TensorParallelSettings(plan=OPT_ATTENTION))
    # An entry of the user's takes the place of the published one.
    kept = TensorParallelSettings(plan={"model.layers.*.mlp.*": "replicate"})
    report = compare(maker("llama"), kept)
    assert not any("mlp" in name for name in report.sharded)
    kept = TensorParallelSettings(plan={"model.layers.*.mlp.experts": "replicate"})
    report = compare(maker("mixtral"), kept)
    assert not any("experts" in name for name in report.sharded)


def test_a_plan_of_the_users_own() -> None:
    check_user_plan()


def shard_blocks(model: Any, mesh: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@ranks(4)
def check_with_fully_shard(kind: str, settings: TensorParallelSettings) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    batches = [batch(seed=seed) for seed in (3, 4)]
    expected: dict[str, torch.Tensor] = {}
    for one in batches:
        whole = maker(kind)()
        step(whole, [one])
        expected = {name: grad / 2 + expected.get(name, 0) for name, grad in gradients(whole).items()}
    model = maker(kind)()
    report = apply_tensor_parallel(model, mesh["tp"], settings)
    shard_blocks(model, mesh["dp_shard"])
    partial_ones = partial_parameters(model, report)
    step(model, [batches[mesh["dp_shard"].get_local_rank()]], settings)
    sum_partial_gradients(normalise(model), partial_ones, mesh["tp"].get_group())
    found = gradients(model)
    # A gradient that only dp has reduced is whole on the tp ranks too, after the sum.
    errors = {name: relative(found[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < GRADIENT, (worst, errors[worst])
    norm = total_norm(p.grad for p in model.parameters() if p.grad is not None)
    reference = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert abs(float(norm - reference)) < 1e-5 * float(reference)


def test_with_fully_shard() -> None:
    check_with_fully_shard("qwen3", SEQUENCE)


def test_experts_with_fully_shard() -> None:
    check_with_fully_shard("mixtral", TensorParallelSettings())


@ranks(2)
def check_lazy(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = lazy_pretrained(folder)
    report = cut(model, tp_mesh(), SEQUENCE)
    assert all(p.is_meta for p in model.parameters())
    loaded = load_lazy_weights(model, device="cpu")
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    assert loaded.bytes_read == 4 * local
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs), name
    assert abs(step(model.train(), [batch()], SEQUENCE) - step(expected.train(), [batch()])) < LOSS
    assert partial_parameters(model, report) <= set(model.parameters())


def test_lazy_weights_fill_the_local_slices(tmp_path: Path) -> None:
    for kind in ("llama", "qwen3"):
        check_lazy(save_tiny_model(tmp_path / kind, kind, layers=2, max_shard_size="100KB"))


@ranks(2)
def check_checkpointing(settings: TensorParallelSettings) -> None:
    def recompute(model: Any, mode: Any) -> None:
        assert apply_checkpointing(model, CheckpointingSettings(mode)) == 2

    for kind, mode in (("llama", "full"), ("llama", "selective"), ("mixtral", "full")):
        compare(maker(kind), settings, batches=[batch(), batch(seed=4)], after=partial(recompute, mode=mode))


def test_activation_checkpointing() -> None:
    check_checkpointing(TensorParallelSettings())


def test_activation_checkpointing_under_sequence_parallelism() -> None:
    check_checkpointing(SEQUENCE)


@ranks(2)
def check_compile(settings: TensorParallelSettings) -> None:
    def compiled(model: Any) -> None:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

    for kind in ("llama", "qwen3"):
        compare(maker(kind), settings, batches=[batch(), batch(seed=4)], after=compiled)


def test_compiled_blocks() -> None:
    check_compile(TensorParallelSettings())


def test_compiled_blocks_under_sequence_parallelism() -> None:
    check_compile(SEQUENCE)
