"""The layout of recipes/pretrain_175b.yaml on 8192 ranks, in a fake process group: shapes and bytes of one rank.

Nothing is sent, and no weight has data. Wrapping takes time for each layer on a mesh of this size, so the model has
one layer for each of the 32 virtual stages instead of three; all layers are alike, and the counts are scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.distributed.tensor import DTensor, Shard

from lightning_swift.parallel.apply import choose_blocks
from lightning_swift.parallel.dtypes import cast_parameters
from lightning_swift.parallel.mesh import MeshSizes, build_mesh, data_parallel_rank
from lightning_swift.strategies._tensor_pipeline_report import startup_table
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy

RECIPE = Path(__file__).parents[2] / "recipes" / "pretrain_175b.yaml"
WORLD, NODES = 8192, 1024
HIDDEN, INNER, HEADS, VOCABULARY = 12288, 32768, 96, 51200
LAYERS, STAGES = 96, 32
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
ENDS = VOCABULARY * HIDDEN


class Empty(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
        )
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config)


@pytest.fixture
def be_rank() -> Iterator[Callable[[int], None]]:
    """Makes this process a rank of a world in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def strategy_of_the_recipe() -> TensorPipelineStrategy:
    options = yaml.safe_load(RECIPE.read_text())["trainer"]["strategy"]["init_args"]
    strategy = TensorPipelineStrategy(**options)
    environment = LightningEnvironment()
    environment.set_world_size(WORLD)
    strategy.cluster_environment, strategy.num_nodes = environment, NODES
    strategy.parallel_devices = [torch.device("cpu")]
    return strategy


def set_up(layers: int) -> tuple[TensorPipelineStrategy, Any]:
    """The transforms from the whole model to shards, in the engine's own order."""
    strategy, module = strategy_of_the_recipe(), Empty(layers)
    strategy._device_mesh = build_mesh(strategy.mesh_sizes, "cpu")
    strategy._lightning_module = module
    strategy._split_into_stages(module)
    cast_parameters(module, strategy.options.policy)
    strategy._split_tensors(module)
    strategy._shard(module, choose_blocks(module, None))
    return strategy, module


def test_the_plan_of_all_ranks(be_rank: Callable[[int], None]) -> None:
    be_rank(0)
    strategy, module = strategy_of_the_recipe(), Empty(LAYERS)
    assert strategy.mesh_sizes == MeshSizes(pp=16, dp_shard=64, tp=8)
    strategy._device_mesh = build_mesh(strategy.mesh_sizes, "cpu")
    strategy._lightning_module = module
    strategy._split_into_stages(module)
    plan = strategy._dealt
    assert len(plan.bounds) == STAGES
    assert [start for start, _ in plan.bounds[1:]] == [end for _, end in plan.bounds[:-1]]
    assert (plan.bounds[0][0], plan.bounds[-1][1]) == (0, LAYERS)
    # 175B, of which no stage has more than a fifth above its share; the head counts as much as a third of a layer.
    assert sum(plan.parameters) == pytest.approx(175e9, rel=0.02)
    assert max(plan.shares) <= 1.2 / STAGES
    # 16 microbatches through 2 stages on each of 16 ranks.
    assert plan.schedule.bubble(16) == pytest.approx(15 / (2 * 16 + 15))
    assert "Interleaved1F1B, 16 microbatches, 2 stages" in startup_table(plan)


CASES = {0: (0, 16), 5003: (9, 25), 8191: (15, 31)}


@pytest.mark.parametrize("rank", CASES)
def test_placements_shapes_and_bytes_of_a_rank(rank: int, be_rank: Callable[[int], None]) -> None:
    be_rank(rank)
    strategy, module = set_up(STAGES)
    mesh = strategy.device_mesh
    assert mesh.get_coordinate() == (rank // 512, 0, rank % 512 // 8, rank % 8)
    assert data_parallel_rank(mesh) == rank % 512 // 8
    parameters = dict(module.named_parameters())
    held = {int(name.split(".")[3]) for name in parameters if ".layers." in name}
    assert held == set(CASES[rank])
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor)
        check(name, parameter)
    elements = sum(p.to_local().numel() for p in parameters.values())
    ends = (ENDS if 0 in held else 0) + (ENDS if STAGES - 1 in held else 0)
    expected = (2 * LAYER + ends) // 512
    # Norms are cut over 64 ranks and not over 8: a few hundred elements.
    assert expected <= elements <= expected + 1000
    # FP32 masters, gradients and two moments. With 6 layers as in the whole model this rank holds 0.36 GB of them.
    whole = 16 * (6 * LAYER + ends) / 512
    assert whole < 0.4e9


def check(name: str, parameter: DTensor) -> None:
    """Placement over (64 data-parallel, 8 tensor-parallel) ranks, and the shape that follows."""
    shape, local, parts = tuple(parameter.shape), tuple(parameter.to_local().shape), parameter.placements
    kind = name.rpartition(".weight")[0].rpartition(".")[2]
    if "norm" in kind:
        assert local == (shape[0] // 64,)
        assert parts == (Shard(0),)
    elif kind in ("o_proj", "down_proj"):
        assert local == (shape[0] // 64, shape[1] // 8)
        assert parts == (Shard(0), Shard(1))
    else:
        assert local == (shape[0] // 512, shape[1])
        # Both axes cut rows: the tensor-parallel one first, and what is left of them the data-parallel one.
        assert (type(parts[0]).__name__, parts[0].dim, parts[1]) == ("_StridedShard", 0, Shard(0))
