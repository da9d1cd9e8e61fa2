"""After ``fully_shard`` each rank reads its own slices of the folder, and no more than 1.1 times its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_swift.models.lazy import is_lazy, lazy_pretrained, load_lazy_weights
from tests.harness.models import save_tiny_model
from tests.harness.ranks import ranks

X = torch.arange(3, 35)[None]
# 251 rows divide evenly by neither 2 nor 4 ranks, and 40 columns give an even head size.
UNEVEN = {"vocab": 251, "hidden": 40}


def shard(model: Any, mesh: Any = None) -> None:
    kinds = set(model._no_split_modules)
    for module in model.modules():
        if type(module).__name__ in kinds:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def count_slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in bytes of all that safetensors hands out from here on."""
    import safetensors

    sizes: list[int] = []

    class Slice:
        def __init__(self, inner: Any) -> None:
            self.inner, self.get_shape = inner, inner.get_shape

        def __getitem__(self, index: Any) -> Any:
            part = self.inner[index]
            sizes.append(part.numel() * part.element_size())
            return part

    class Counted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.inner = original(*args, **kwargs)

        def __enter__(self) -> Any:
            self.inner.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.inner.__exit__(*args)

        def keys(self) -> Any:
            return self.inner.keys()

        def get_slice(self, name: str) -> Any:
            return Slice(self.inner.get_slice(name))

        def get_tensor(self, name: str) -> Any:
            part = self.inner.get_tensor(name)
            sizes.append(part.numel() * part.element_size())
            return part

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Counted)
    return sizes


def check_shards(folder: Path) -> None:
    expected = reference(folder)
    whole = sum(p.numel() * p.element_size() for p in expected.parameters())
    model = lazy_pretrained(folder)
    shard(model)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        sizes = count_slices(patch)
        report = load_lazy_weights(model, device="cpu")
    assert sum(sizes) == report.bytes_read
    local = sum(p.to_local().numel() * 4 for p in model.parameters())
    assert report.bytes_read == local
    # A vector shorter than the world leaves some ranks without a part, hence the 1.1.
    assert report.bytes_read <= 1.1 * whole / dist.get_world_size()
    assert not is_lazy(model)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    # Same arithmetic on the gathered parameters, in the same order.
    assert torch.equal(model(X).logits, expected(X).logits)
    model(X).logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path, request.param, max_shard_size="100KB", **UNEVEN)


@ranks(2)
def check_2(folder: Path) -> None:
    check_shards(folder)


@ranks(4)
def check_4(folder: Path) -> None:
    check_shards(folder)


def test_two_ranks_read_their_share(folder: Path) -> None:
    check_2(folder)


def test_four_ranks_read_their_share(folder: Path) -> None:
    check_4(folder)


@ranks(4)
def check_hybrid(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = lazy_pretrained(folder)
    shard(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
    report = load_lazy_weights(model, device="cpu")
    expected = reference(folder)
    whole = sum(p.numel() * p.element_size() for p in expected.parameters())
    assert report.bytes_read <= 1.1 * whole / 2
    assert torch.equal(model(X).logits, expected(X).logits)


def test_hybrid_sharding_reads_one_share_per_group(tmp_path: Path) -> None:
    check_hybrid(save_tiny_model(tmp_path, **UNEVEN))


@ranks(2)
def check_adapters(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(dist.get_rank())
    config = LoraConfig(target_modules="all-linear", r=3, init_lora_weights="gaussian")
    expected = get_peft_model(lazy_pretrained(folder), config)
    load_lazy_weights(expected, device="cpu")
    model = get_peft_model(lazy_pretrained(folder), config)
    shard(model.get_base_model())
    load_lazy_weights(model, device="cpu")
    for (name, ours), (_, theirs) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs), name
    assert torch.equal(model(input_ids=X).logits, expected(input_ids=X).logits)


def test_adapters_are_sharded_with_an_empty_base(tmp_path: Path) -> None:
    check_adapters(save_tiny_model(tmp_path, **UNEVEN))


@ranks(2)
def check_columns(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = lazy_pretrained(folder)
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer.mlp, init_device_mesh("cpu", (2,)), plan)
    load_lazy_weights(model, device="cpu")
    # Row parallelism sums two halves of each product: one rounding more than the reference, logits are of order 1.
    torch.testing.assert_close(model(X).logits, reference(folder)(X).logits, rtol=1e-5, atol=1e-6)


def test_columns_are_read_for_tensor_parallelism(tmp_path: Path) -> None:
    check_columns(save_tiny_model(tmp_path))
