"""Which modules are blocks, embeddings and heads, and how a module is cut into groups."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_swift.errors import ConfigurationError, ModelError
from lightning_swift.parallel.apply import choose_blocks
from lightning_swift.parallel.blocks import find_blocks, find_embeddings, is_separable
from lightning_swift.parallel.dtypes import PrecisionPolicy
from lightning_swift.parallel.mesh import MeshSizes, build_mesh
from lightning_swift.parallel.sharding import ShardingSettings, shard
from tests.harness.models import tiny_model
from tests.harness.ranks import ranks
from tests.parallel.references import PlainModule, Seq2Seq, TiedByHand, ValueHead


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(model)]


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma"])
def test_hugging_face_models_name_their_blocks(kind: str) -> None:
    model = tiny_model(kind)
    assert names(model) == [f"model.layers.{i}" for i in range(3)]
    # transformers fills the set from the children, so parts of a model find theirs as well.
    assert names(model.model) == [f"layers.{i}" for i in range(3)]
    assert find_embeddings(model) == [(model.model.embed_tokens, False), (model.lm_head, True)]


def test_gpt2_and_a_module_that_holds_a_model() -> None:
    assert names(tiny_model("gpt2")) == [f"transformer.h.{i}" for i in range(3)]
    module = ValueHead("llama")
    module.configure_model()
    # The value head is a Sequential of single layers: not blocks next to real ones.
    assert names(module) == [f"model.model.layers.{i}" for i in range(3)]


def test_single_parts_that_a_model_lists_are_not_blocks() -> None:
    model = nn.Module()
    model.embedding, model.layers = nn.Embedding(4, 4), nn.ModuleList([Block(), Block()])
    model._no_split_modules = {"Embedding", "Block"}
    assert names(model) == ["layers.0", "layers.1"]
    model._no_split_modules = ["Absent"]
    assert names(model) == ["layers.0", "layers.1"]
    model._no_split_modules = None
    assert names(model) == ["layers.0", "layers.1"]


def test_blocks_of_any_other_module_are_what_repeats() -> None:
    assert names(Seq2Seq()) == [f"encoder.{side}.layers.{i}" for side in ("encoder", "decoder") for i in range(2)]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert names(nn.ModuleDict({"a": Block(), "b": Block()})) == ["a", "b"]
    nested = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(2)])
    assert names(nested) == ["0", "1"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    assert names(nn.Sequential(nn.ReLU(), nn.ReLU())) == []
    assert names(Block()) == []


def test_what_is_shared_cannot_be_a_group_of_its_own() -> None:
    model = tiny_model("qwen3")
    assert not is_separable(model.lm_head, model)
    assert not is_separable(model.model.embed_tokens, model)
    assert all(is_separable(block, model) for _, block in find_blocks(model))
    layers = nn.ModuleList([Block(), Block(), Block()])
    layers[1].up = layers[0].up
    assert [is_separable(block, layers) for block in layers] == [False, False, True]
    root = nn.Module()
    root.layers, root.second_name = layers, layers[2]
    assert is_separable(layers[2], root)


def test_classes_can_be_named() -> None:
    model = tiny_model()
    assert len(choose_blocks(model, ("LlamaMLP", "LlamaAttention"))) == 6
    with pytest.raises(ConfigurationError, match="Did you mean 'LlamaMLP'"):
        choose_blocks(model, ("LlamaMLPs",))


class Flat(L.LightningModule):
    """Everything that a module may hold: lists, dictionaries, second names, metrics, frozen and own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.experts = nn.ModuleDict({"a": Block(), "list": nn.ModuleList([nn.Linear(4, 4)])})
        self.parts = nn.ParameterList([torch.ones(3), torch.ones(2, 2)])
        self.own = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.wrapper = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.second_name = self.wrapper[0]
        self.metric = nn.ReLU()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for layer in self.layers:
            batch = batch + layer.up(batch)
        return batch.sum()


def shard_all(module: nn.Module) -> list[FSDPModule]:
    mesh = build_mesh(MeshSizes(dp_shard=dist.get_world_size()), "cpu")
    settings = ShardingSettings(PrecisionPolicy("32-true"))
    return shard(module, mesh, settings, find_blocks(module))


def groups(module: nn.Module) -> set[str]:
    return {name for name, part in module.named_modules() if isinstance(part, FSDPModule)}


@ranks(2)
def test_every_parameter_is_sharded_and_keeps_its_name() -> None:
    makers: list[Any] = [Flat, PlainModule, TiedByHand, Seq2Seq, lambda: tiny("qwen3"), lambda: tiny("llama")]
    for make in makers:
        module = make()
        before = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        values = {name: p.detach().clone() for name, p in module.named_parameters()}
        shard_all(module)
        assert [name for name, _ in module.named_parameters(remove_duplicate=False)] == before
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert torch.equal(parameter.full_tensor(), values[name]), name


def tiny(kind: str) -> L.LightningModule:
    module = ValueHead(kind)
    module.configure_model()
    return module


@ranks(2)
def test_groups_of_real_models() -> None:
    blocks = {f"model.model.layers.{i}" for i in range(3)}
    module = tiny("llama")
    roots = shard_all(module)
    assert groups(module) == blocks | {"model", "value", "model.model.embed_tokens", "model.lm_head"}
    assert roots == [module.value, module.model]
    # Tied: embedding and head stay together in the group of the model.
    module = tiny("qwen3")
    shard_all(module)
    assert groups(module) == blocks | {"model", "value"}
    module = PlainModule()
    shard_all(module)
    assert groups(module) == {"embedding", "encoder", "head", *(f"encoder.layers.{i}" for i in range(3))}
    module = TiedByHand()
    assert shard_all(module) == [module]
    assert groups(module) == {"", "embedding", "encoder", "head", *(f"encoder.layers.{i}" for i in range(3))}


@ranks(2)
def test_a_parameter_without_dimensions_is_refused_by_name() -> None:
    module = Flat()
    module.temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ModelError, match="temperature"):
        shard_all(module)
