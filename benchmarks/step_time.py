"""Step time of ``FSDPBF16Strategy`` under the Trainer beside a hand-written FSDP2 loop and Lightning's own strategies.

Every contender runs in processes of its own, because what a strategy sets in its process (the memory allocator, say)
would otherwise help or hinder the others. Every round runs all of them, in an order that changes, and the ratio to
a hand-written loop is taken within the round; the table has the median over the rounds. "Memory returned" is the
allocator setting that makes sharding save memory on CPU (``return_freed_memory``); it costs page faults in every
contender that has it, so each FSDP2 contender is compared with the loop that has the same setting. CPU seconds are
those of one rank; on a busy machine they say more than the wall clock. ``python -m benchmarks.step_time``
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.launch import report, table, torchrun
from benchmarks.workload import Module, Workload, loader

WORKLOAD = Workload(hidden=512, layers=6, vocab=8192, batch=2, length=256)
WARM_UP = 2
CONTENDERS = {
    "by_hand": "hand-written FSDP2 loop, memory returned",
    "ours": "Trainer + FSDPBF16Strategy, memory returned",
    "by_hand_keeping": "hand-written FSDP2 loop",
    "ours_keeping": "Trainer + FSDPBF16Strategy(return_freed_memory=False)",
    "model_parallel": "Trainer + ModelParallelStrategy (user shards)",
    "ddp": "Trainer + DDP, bf16-mixed",
}
BASELINES = {"by_hand": "by_hand", "ours": "by_hand"}
DEFAULT_BASELINE = "by_hand_keeping"


def main() -> None:
    """Launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for index in range(args.rounds):
        order = args.only[index % len(args.only) :] + args.only[: index % len(args.only)]
        rounds.append({name: torchrun("benchmarks.step_time", args.ranks, [name, str(args.steps)]) for name in order})
    table(
        f"Step time, {args.ranks} CPU ranks, median of {len(rounds)} paired rounds",
        ["contender", "wall s", "to its loop", "range", "CPU s", "to its loop"],
        [_row(name, rounds) for name in args.only],
    )


def _row(name: str, rounds: list[dict[str, Any]]) -> tuple[str, ...]:
    wall, cpu = (
        [r[name][kind] / r[BASELINES.get(name, DEFAULT_BASELINE)][kind] for r in rounds] for kind in ("wall", "cpu")
    )
    seconds = [statistics.median(r[name][kind] for r in rounds) for kind in ("wall", "cpu")]
    return (
        CONTENDERS[name],
        f"{seconds[0]:.3f}",
        f"{statistics.median(wall):.3f}",
        f"{min(wall):.3f} to {max(wall):.3f}",
        f"{seconds[1]:.3f}",
        f"{statistics.median(cpu):.3f}",
    )


def worker() -> None:
    """Run one contender in this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run: dict[str, Callable[[int], Clock]] = {
        "by_hand": lambda steps: _by_hand(steps, returning=True),
        "ours": lambda steps: _ours(steps, returning=True),
        "by_hand_keeping": lambda steps: _by_hand(steps, returning=False),
        "ours_keeping": lambda steps: _ours(steps, returning=False),
        "model_parallel": _model_parallel,
        "ddp": _ddp,
    }
    clock = run[sys.argv[1]](int(sys.argv[2]))
    report({"wall": _median_gap(clock.wall), "cpu": _median_gap(clock.cpu)})
    # No rank leaves while another one still waits for it.
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Clock:
    """Wall and CPU time at the end of each step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def tick(self) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def _shard(model: Any, mesh: Any) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model.model.embed_tokens, mesh=mesh, mp_policy=policy)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _data(steps: int) -> Any:
    import torch.distributed as dist

    return loader(WORKLOAD, steps + WARM_UP, rank=dist.get_rank(), world_size=dist.get_world_size())


def _by_hand(steps: int, *, returning: bool) -> Clock:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from lightning_swift.parallel.memory import return_freed_memory

    if returning:
        return_freed_memory()
    model = WORKLOAD.model()
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    clock = Clock()
    for batch in _data(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.tick()
    return clock


def _fit(steps: int, strategy: Any, *, shard: Any = None, precision: Any = None) -> Clock:
    import lightning as L

    clock = Clock()

    class Ticks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Ticks()],
    )
    trainer.fit(Module(WORKLOAD, shard=shard), _data(steps))
    return clock


def _ours(steps: int, *, returning: bool) -> Clock:
    from lightning_swift import FSDPBF16Strategy

    return _fit(steps, FSDPBF16Strategy(return_freed_memory=returning))


def _model_parallel(steps: int) -> Clock:
    import torch.distributed as dist
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return _fit(steps, strategy, shard=lambda model, mesh: _shard(model, mesh["data_parallel"]))


def _ddp(steps: int) -> Clock:
    return _fit(steps, "ddp", precision="bf16-mixed")


def _median_gap(marks: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False))


if __name__ == "__main__":
    worker() if "LOCAL_RANK" in os.environ else main()
