"""Step time of ``FSDPBF16Strategy`` under the Trainer beside a hand-written FSDP2 loop and Lightning's own strategies.

"Memory returned" is the allocator setting that makes sharding save memory on CPU (``return_freed_memory``); it costs
page faults in every contender that has it, so each FSDP2 contender is compared with the loop that has the same setting.
``python -m benchmarks.step_time``
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.launch import table
from benchmarks.paired import WARM_UP, Clock, row, take_turns
from benchmarks.workload import Module, Workload, fit, loader

WORKLOAD = Workload(hidden=512, layers=6, vocab=8192, batch=2, length=256)
CONTENDERS = {
    "by_hand": "hand-written FSDP2 loop, memory returned",
    "ours": "Trainer + FSDPBF16Strategy, memory returned",
    "by_hand_keeping": "hand-written FSDP2 loop",
    "ours_keeping": "Trainer + FSDPBF16Strategy(return_freed_memory=False)",
    "model_parallel": "Trainer + ModelParallelStrategy (user shards)",
    "ddp": "Trainer + DDP, bf16-mixed",
}
BASELINES = {**dict.fromkeys(CONTENDERS, "by_hand_keeping"), "by_hand": "by_hand", "ours": "by_hand"}


def main() -> None:
    """Launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    args = parser.parse_args()
    rounds = take_turns(
        "benchmarks.step_time", args.only, ranks=args.ranks, rounds=args.rounds, arguments=[str(args.steps)]
    )
    table(
        f"Step time, {args.ranks} CPU ranks, median of {len(rounds)} paired rounds",
        ["contender", "wall s", "to its loop", "range", "CPU s", "to its loop"],
        [row(name, CONTENDERS[name], rounds, BASELINES) for name in args.only],
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
    clock.report()
    # No rank leaves while another one still waits for it.
    dist.barrier()
    dist.destroy_process_group()


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
    clock = Clock()
    fit(Module(WORKLOAD, shard=shard), _data(steps), strategy, tick=clock.tick, precision=precision)
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


if __name__ == "__main__":
    worker() if "LOCAL_RANK" in os.environ else main()
