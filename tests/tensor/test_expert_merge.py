"""Merging a checkpoint of fused experts cut over ranks writes the names and bytes that transformers itself writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_swift.checkpoint.experts import FAMILIES
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.parallel.tensor import TensorParallelSettings, apply_tensor_parallel
from tests.harness.checkpoints import save_checkpoint
from tests.harness.models import tiny_model
from tests.harness.ranks import ranks


@ranks(4)
def save(directory: Path, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = tiny_model(kind, layers=2)
    apply_tensor_parallel(model, mesh["tp"], TensorParallelSettings())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])

    def companions(folder: Path) -> None:
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(folder)

    state: dict[str, Any] = {f"model.model.{name}": parameter for name, parameter in model.named_parameters()}
    save_checkpoint(directory, state, companions=companions, huggingface="model", tied={})


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_merge_gives_the_names_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    save(tmp_path / "a.ckpt", kind)
    model = tiny_model(kind, layers=2)
    model.save_pretrained(tmp_path / "expected")
    expected = load_file(tmp_path / "expected" / "model.safetensors")
    report = merge_checkpoint(tmp_path / "a.ckpt", tmp_path / "merged", max_shard_size="200KB")
    assert report.tensors == len(expected)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "merged").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_families_are_those_of_transformers() -> None:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    for kind, names in FAMILIES.items():
        # The mapping of a type is given by its own name; others are applied to parts of it.
        mapping = get_checkpoint_conversion_mapping(kind)  # type: ignore[no-untyped-call]
        sources = {t.target_patterns[0]: t.source_patterns for t in mapping if isinstance(t, WeightConverter)}
        gate_up, down = (
            next(v for k, v in sources.items() if "gate_up" in k),
            next(v for k, v in sources.items() if "down" in k),
        )
        assert [pattern.split(".")[-2] for pattern in gate_up] == list(names.gate_up), kind
        assert [pattern.split(".")[-2] for pattern in down] == [names.down], kind
        renamed = [t for t in mapping if isinstance(t, WeightRenaming)]
        if names.renamed[0] == names.renamed[1]:
            assert not renamed, kind
        else:
            assert (renamed[0].target_patterns, renamed[0].source_patterns) == ([names.renamed[0]], [names.renamed[1]])
