"""Axes and sizes of the device mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_swift.errors import ConfigurationError
from lightning_swift.parallel.mesh import MeshAxis, MeshSizes, build_mesh, data_parallel_mesh, data_parallel_rank
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks


@pytest.mark.parametrize(
    ("world", "asked", "expected"),
    [
        (8, {}, (1, 1, 8, 1)),
        (8, {"replicate": 2}, (1, 2, 4, 1)),
        (8, {"shard": 2, "replicate": "auto"}, (1, 4, 2, 1)),
        (8, {"shard": "auto", "replicate": "auto"}, (1, 1, 8, 1)),
        (8, {"shard": 1, "replicate": 8}, (1, 8, 1, 1)),
        (8, {"pp": 2, "tp": 2}, (2, 1, 2, 2)),
        (1, {}, (1, 1, 1, 1)),
    ],
)
def test_auto_fills_what_is_left(world: int, asked: dict[str, Any], expected: tuple[int, ...]) -> None:
    sizes = MeshSizes.resolve(world, **asked)
    assert sizes.shape == expected
    assert sizes.data_parallel == expected[1] * expected[2]


@pytest.mark.parametrize(
    ("world", "asked", "named"),
    [
        (8, {"shard": 3}, ("data_parallel_replicate=1", "data_parallel_shard=3", "8")),
        (8, {"replicate": 3}, ("data_parallel_replicate=3", "data_parallel_shard=2", "8")),
        (2, {"replicate": 4}, ("data_parallel_replicate=4", "2")),
        (8, {"shard": 4, "replicate": 4}, ("data_parallel_replicate=4", "data_parallel_shard=4", "8")),
        (8, {"tp": 3}, ("tp=3", "8")),
    ],
)
def test_sizes_that_do_not_fit_are_named(world: int, asked: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MeshSizes.resolve(world, **asked)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_the_trainer_refuses_them_before_any_process_is_started() -> None:
    with pytest.raises(ConfigurationError, match="data_parallel_shard=3"):
        quiet_trainer(strategy=FSDPBF16Strategy(data_parallel_shard=3), devices=2)
    with pytest.raises(ConfigurationError, match="is not the number of ranks, 6"):
        quiet_trainer(strategy=FSDPBF16Strategy(data_parallel_shard=4), devices=2, num_nodes=3)


@pytest.mark.parametrize("size", [0, -1, 1.5, "all", True])
@pytest.mark.parametrize("option", ["data_parallel_shard", "data_parallel_replicate"])
def test_sizes_that_no_number_of_ranks_satisfies(option: str, size: Any) -> None:
    with pytest.raises(ConfigurationError, match=option):
        FSDPBF16Strategy(**{option: size})


def test_text() -> None:
    assert str(MeshSizes()) == "1 rank"
    assert str(MeshSizes(dp_replicate=2, dp_shard=4)) == "dp_replicate 2, dp_shard 4"


@ranks(4)
def test_neighbouring_ranks_share_the_innermost_axis() -> None:
    mesh = build_mesh(MeshSizes(dp_replicate=2, dp_shard=2), "cpu")
    assert mesh.mesh_dim_names == tuple(MeshAxis)
    assert data_parallel_mesh(mesh).shape == (2, 2)
    assert data_parallel_rank(mesh) == dist.get_rank()
    assert mesh[MeshAxis.DP_SHARD].get_local_rank() == dist.get_rank() % 2
    assert data_parallel_mesh(build_mesh(MeshSizes(dp_shard=4), "cpu")).shape == (4,)
    # With tensor parallelism two neighbours see the same data.
    mesh = build_mesh(MeshSizes(dp_shard=2, tp=2), "cpu")
    assert data_parallel_rank(mesh) == dist.get_rank() // 2
    assert data_parallel_mesh(mesh).mesh.tolist() == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
