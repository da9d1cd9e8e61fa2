"""A save of two ranks that faults strike, and what must be true of the directory afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_swift.checkpoint.faults import FAULT_VARIABLE
from lightning_swift.checkpoint.layout import RunRecord
from lightning_swift.checkpoint.newest import find_newest
from lightning_swift.checkpoint.safe_load import verify
from lightning_swift.checkpoint.sharded import Description, load_into, load_meta, save
from lightning_swift.strategies._checkpointing import ShardedCheckpointing

RUN = RunRecord(id="run-1", started="2026-01-01T00:00:00")
SHAPES = {"model.a": (8, 4), "model.b": (5, 3), "optimizer_0.state.a.exp_avg": (8, 4)}


def save_step(path: Path, step: int) -> None:
    """Save a checkpoint in which every number is ``step``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        name: distribute_tensor(torch.full(shape, float(step)), mesh, [Shard(0)]) for name, shape in SHAPES.items()
    }
    description = Description(run=RUN, global_step=step, strategy="Test", mesh={"dp_shard": dist.get_world_size()})
    save(path, state=state | {"optimizer_0.param_groups.a.lr": step}, meta={"step": step}, description=description)


def save_two(folder: Path, second: str, fault: str) -> None:
    """Step 1 as ``first.ckpt`` undisturbed, then step 2 as ``second`` with ``fault`` armed, then retention."""
    save_step(folder / "first.ckpt", 1)
    os.environ[FAULT_VARIABLE] = fault
    save_step(folder / second, 2)
    if second != "first.ckpt":
        strategy: Any = SimpleNamespace(is_global_zero=dist.get_rank() == 0)
        ShardedCheckpointing.remove_checkpoint(strategy, folder / "first.ckpt")


def content(path: Path) -> int:
    """The step of a checkpoint, of which every byte is checked and every number compared."""
    manifest = verify(path)
    step = manifest.global_step
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state["optimizer_0.param_groups.a.lr"] = None
    load_into(path, state, strict=True)
    for name in SHAPES:
        assert state[name].eq(step).all(), f"{path}: {name} is a mixture: {state[name]}"
    assert state["optimizer_0.param_groups.a.lr"] == step
    assert load_meta(path) == {"step": step}
    return step


def newest_step(folder: Path) -> int:
    newest = find_newest([folder])
    assert newest is not None, sorted(entry.name for entry in folder.iterdir())
    return content(newest)
