"""Mixture-of-experts folders, which have a tensor for each expert, fill the model's fused parameters lazily."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ModelError
from lightning_swift.models.lazy import lazy_pretrained, load_lazy_weights
from tests.harness.models import save_tiny_model
from tests.harness.ranks import ranks
from tests.tensor.cases import LOSS, batch, cut, step, tp_mesh


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_folder_of_single_experts_loads_lazily(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_tiny_model(tmp_path, kind, layers=2, max_shard_size="100KB")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = lazy_pretrained(folder)
    report = load_lazy_weights(model, device="cpu")
    assert report.unexpected == ()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@ranks(2)
def check_share(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = lazy_pretrained(folder)
    cut(model, tp_mesh())
    loaded = load_lazy_weights(model, device="cpu")
    local = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    assert loaded.bytes_read == 4 * local
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.full_tensor() if isinstance(ours, DTensor) else ours, theirs), name
    assert abs(step(model.train(), [batch()]) - step(expected.train(), [batch()])) < LOSS


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_each_rank_reads_its_own_experts(tmp_path: Path, kind: str) -> None:
    check_share(save_tiny_model(tmp_path, kind, layers=2, max_shard_size="100KB"))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "mixtral", layers=1)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"no weights for 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"):
        lazy_pretrained(folder)
