"""Tensor parallelism together with fully_shard, lazy weights, checkpointing, compile and a plan of the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ModelError
from lightning_swift.models.lazy import lazy_pretrained, load_lazy_weights
from lightning_swift.parallel.checkpointing import CheckpointingSettings, apply_checkpointing
from lightning_swift.parallel.tensor import (
    TensorParallelSettings,
    partial_parameters,
)
from tests.harness.models import save_tiny_model
from tests.harness.ranks import ranks
from tests.tensor.cases import LOSS, batch, compare, cut, maker, step, tp_mesh

PLAIN, SEQUENCE = TensorParallelSettings(), TensorParallelSettings(sequence_parallel=True)
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
def check_checkpointing() -> None:
    def recompute(model: Any, mode: Any) -> None:
        assert apply_checkpointing(model, CheckpointingSettings(mode)) == 2

    cases = (("llama", "full", PLAIN), ("llama", "selective", SEQUENCE), ("mixtral", "full", SEQUENCE))
    for kind, mode, settings in cases:
        compare(maker(kind), settings, after=partial(recompute, mode=mode))


def test_activation_checkpointing() -> None:
    check_checkpointing()


@ranks(2)
def check_compile() -> None:
    def compiled(model: Any) -> None:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

    # Under sequence parallelism, and with recomputation, whole runs are compiled elsewhere.
    compare(maker("llama", layers=1), PLAIN, after=compiled)


def test_compiled_blocks() -> None:
    check_compile()
