"""Step time of ``FSDPBF16Strategy`` under the Trainer beside a hand-written FSDP2 loop and Lightning's own strategies.

Every round runs all contenders once in the same processes, in an order that changes, and the ratio to the
hand-written loop is taken within the round; the table has the median over the rounds.
``python -m benchmarks.step_time``
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.launch import report, table, torchrun
from benchmarks.workload import Module, Workload, loader

WORKLOAD = Workload(hidden=512, layers=6, vocab=8192, batch=2, length=256)
WARM_UP = 2
BASELINE = "hand-written FSDP2 loop"
OURS = "Trainer + FSDPBF16Strategy"


def main() -> None:
    """Launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each contender in a round")
    args = parser.parse_args()
    rounds = torchrun("benchmarks.step_time", args.ranks, ["--rounds", str(args.rounds), "--steps", str(args.steps)])
    rows = []
    for name in rounds[0]:
        ratios = [r[name] / r[BASELINE] for r in rounds]
        seconds = statistics.median(r[name] for r in rounds)
        rows.append(
            (name, f"{seconds:.3f}", f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}")
        )
    table(
        f"Step time, {args.ranks} CPU ranks, median of {len(rounds)} paired rounds",
        ["contender", "seconds per step", "ratio", "range of ratios"],
        rows,
    )


def worker() -> None:
    """Run the rounds in this rank."""
    import torch
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders: dict[str, Callable[[int], float]] = {
        BASELINE: _by_hand,
        OURS: _ours,
        "Trainer + ModelParallelStrategy (user shards)": _model_parallel,
        "Trainer + DDP, bf16-mixed": _ddp,
    }
    rounds = []
    for index in range(args.rounds):
        names = list(contenders)
        order = names[index % len(names) :] + names[: index % len(names)]
        times = {name: contenders[name](args.steps) for name in order}
        rounds.append({name: times[name] for name in names})
    report(rounds)
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


def _by_hand(steps: int) -> float:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    model = WORKLOAD.model()
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks = []
    for batch in _data(steps):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        marks.append(time.perf_counter())
    return _median_gap(marks)


def _fit(steps: int, strategy: Any, *, shard: Any = None, precision: Any = None) -> float:
    import lightning as L

    marks: list[float] = []

    class Clock(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            marks.append(time.perf_counter())

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
        callbacks=[Clock()],
    )
    trainer.fit(Module(WORKLOAD, shard=shard), _data(steps))
    return _median_gap(marks)


def _ours(steps: int) -> float:
    from lightning_swift import FSDPBF16Strategy

    return _fit(steps, FSDPBF16Strategy())


def _model_parallel(steps: int) -> float:
    import torch.distributed as dist
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return _fit(steps, strategy, shard=lambda model, mesh: _shard(model, mesh["data_parallel"]))


def _ddp(steps: int) -> float:
    return _fit(steps, "ddp", precision="bf16-mixed")


def _median_gap(marks: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False))


if __name__ == "__main__":
    worker() if "LOCAL_RANK" in os.environ else main()
