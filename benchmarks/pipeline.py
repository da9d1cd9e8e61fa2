"""Pipelines: time that ranks wait against theory, what the strategy adds to bare torch, building a schedule anew.

*Bubble.* Every layer of a tiny model sleeps, twice as long in the backward pass, so that ranks do not compete for
cores. A step of ``m`` microbatches takes ``a + b m`` seconds; the share of it in which a rank waits is measured as
``1 - b m / T``, with ``b`` from runs of two different ``m``, and compared with ``(p - 1) / (v m + p - 1)``.

*Overhead.* The same stages, batches and optimizer under the Trainer with ``TensorPipelineStrategy`` and in a bare loop
around ``torch.distributed.pipelining``, in one process each, round by round; the median of the ratios.

*Rebuild.* A batch of another length needs another schedule, since receive buffers have fixed shapes.
``python -m benchmarks.pipeline``
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.launch import report, table, torchrun
from benchmarks.workload import Workload

RANKS = 4
SLEEP = 0.05
FEW, MANY = 8, 16
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
STEPS = 6
WARM_UP = 2
WORKLOAD = Workload(hidden=384, layers=6, vocab=4096, batch=8, length=128)


def main() -> None:
    """Launch the workers and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with a bare loop")
    parser.add_argument("--only", nargs="+", choices=["bubble", "overhead", "rebuild"], default=None)
    args = parser.parse_args()
    chosen = args.only or ["bubble", "overhead", "rebuild"]
    if "bubble" in chosen:
        table(
            f"Share of a step that a rank waits, {RANKS} ranks, {FEW} microbatches, layers that sleep",
            ["schedule", "step s", "measured", "theory", "relative difference"],
            [_bubble_row(name) for name in SCHEDULES],
        )
    if "overhead" in chosen:
        rounds = [
            {kind: torchrun("benchmarks.pipeline", 2, [kind]) for kind in ("bare", "ours")} for _ in range(args.rounds)
        ]
        table(
            "A step on 2 ranks, 1F1B, 4 microbatches", ["", "bare torch", "strategy", "ratio"], _overhead_rows(rounds)
        )
    if "rebuild" in chosen:
        found = torchrun("benchmarks.pipeline", 2, ["rebuild"])
        table(
            "Building a schedule for another length, 2 ranks",
            ["schedule", "microbatches", "ms"],
            [(name, str(count), f"{1000 * seconds:.1f}") for name, count, seconds in found],
        )


def _bubble_row(name: str) -> tuple[str, ...]:
    few, many = (torchrun("benchmarks.pipeline", RANKS, ["bubble", name, str(count)]) for count in (FEW, MANY))
    each = (many - few) / (MANY - FEW)
    measured = 1 - FEW * each / few
    theory = (RANKS - 1) / (SCHEDULES[name] * FEW + RANKS - 1)
    return (
        name,
        f"{few:.3f}",
        f"{100 * measured:.1f} %",
        f"{100 * theory:.1f} %",
        f"{100 * (measured / theory - 1):+.1f} %",
    )


def _overhead_rows(rounds: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = []
    for kind, title in (("wall", "wall s"), ("cpu", "CPU s of one rank")):
        ratios = [r["ours"][kind] / r["bare"][kind] for r in rounds]
        medians = [statistics.median(r[who][kind] for r in rounds) for who in ("bare", "ours")]
        rows.append((title, f"{medians[0]:.3f}", f"{medians[1]:.3f}", f"{statistics.median(ratios):.3f}"))
    return rows


def worker() -> None:
    """Run one measurement in this rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    what, *arguments = sys.argv[1:]
    if what == "bubble":
        report(_sleeping(arguments[0], int(arguments[1])))
    elif what == "rebuild":
        report(_rebuild())
    else:
        report(_bare() if what == "bare" else _ours())
    dist.barrier()
    dist.destroy_process_group()


def _sleep_in_layers(model: Any) -> None:
    import torch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any) -> Any:
            time.sleep(SLEEP)
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            time.sleep(2 * SLEEP)
            return gradient

    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, output: Sleep.apply(output))


def _sleeping(schedule: str, microbatches: int) -> float:
    """Least seconds of a step of a pipeline of layers that sleep, one on each stage."""
    import torch
    import torch.distributed as dist

    from lightning_swift.parallel.schedule import ScheduleSettings

    layers = RANKS * SCHEDULES[schedule]
    model = Workload(hidden=64, layers=layers, vocab=64, batch=1, length=8).model()
    _sleep_in_layers(model)
    settings = ScheduleSettings(schedule, microbatches, SCHEDULES[schedule])  # type: ignore[arg-type]
    pipelined = _pipelined(model, settings)
    ids = torch.randint(0, 64, (microbatches, 8), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(WARM_UP + 4):
        dist.barrier()
        begin = time.perf_counter()
        pipelined(input_ids=ids, labels=ids)
        seconds.append(time.perf_counter() - begin)
    # What other work on the machine adds is no wait of the pipeline.
    return min(seconds[WARM_UP:])


def _pipelined(model: Any, settings: Any) -> Any:
    import torch.distributed as dist

    from lightning_swift.parallel.pipeline import PipelinedModel

    return PipelinedModel(_stages(model, settings), group=dist.group.WORLD, schedule=settings)


def _stages(model: Any, settings: Any) -> list[Any]:
    import torch.distributed as dist

    from lightning_swift.parallel.anatomy import probe
    from lightning_swift.parallel.stages import balance, cut

    rank, size = dist.get_rank(), dist.get_world_size()
    anatomy = probe(model)
    bounds = balance(model, anatomy, settings.n_stages(size))
    return cut(model, anatomy, bounds, settings.stage_ids(rank, size))


def _rebuild() -> list[tuple[str, int, float]]:
    import torch

    from lightning_swift.parallel.schedule import ScheduleSettings

    found = []
    for name, virtual in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        for count in (8, 64):
            model = Workload(hidden=64, layers=4, vocab=64, batch=1, length=8).model()
            pipelined = _pipelined(model, ScheduleSettings(name, count, virtual))  # type: ignore[arg-type]
            for length in range(8, 16):
                ids = torch.zeros(count, length, dtype=torch.long)
                pipelined(input_ids=ids, labels=ids)
            builds, seconds = pipelined.schedule_builds
            found.append((name, count, seconds / builds))
    return found


def _batches() -> Any:
    from benchmarks.workload import loader

    return loader(WORKLOAD, STEPS + WARM_UP, rank=0, world_size=1)


def _median(marks: list[tuple[float, float]]) -> dict[str, float]:
    gaps = [
        [b - a for a, b in zip(one[WARM_UP - 1 :], one[WARM_UP:], strict=False)] for one in zip(*marks, strict=True)
    ]
    return {"wall": statistics.median(gaps[0]), "cpu": statistics.median(gaps[1])}


def _bare() -> dict[str, float]:
    """Torch's own stage and schedule around the same part of the model, as its tutorial has it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from lightning_swift.parallel.schedule import ScheduleSettings

    (part,) = _stages(WORKLOAD.model(), ScheduleSettings("1F1B", 4, 1))
    first = dist.get_rank() == 0
    stage = PipelineStage(_plain(part, last=not first), dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
    marks = []
    for batch in _batches():
        optimizer.zero_grad()
        if first:
            schedule.step(batch["input_ids"])
        else:
            schedule.step(target=batch["labels"], losses=[])
        optimizer.step()
        marks.append((time.perf_counter(), time.process_time()))
    return _median(marks)


def _loss(logits: Any, labels: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def _plain(part: Any, *, last: bool) -> Any:
    """The stage as a module of one input and one output."""
    from torch import nn

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(part.layers)
            self.model = part.pretrained.model

        def forward(self, inputs: Any) -> Any:
            import torch

            hidden = inputs if last else self.model.embed_tokens(inputs)
            positions = torch.arange(hidden.shape[1])[None]
            tables = self.model.rotary_emb(hidden, positions)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=tables)
            return part.pretrained.lm_head(self.model.norm(hidden)) if last else hidden

    return Plain()


def _ours() -> dict[str, float]:
    from benchmarks.workload import Module, fit
    from lightning_swift import TensorPipelineStrategy

    marks: list[tuple[float, float]] = []
    strategy = TensorPipelineStrategy(
        "32-true", pipeline_parallel_size=2, tensor_parallel_size=1, microbatches=4, return_freed_memory=False
    )
    fit(Module(WORKLOAD), _batches(), strategy, tick=lambda: marks.append((time.perf_counter(), time.process_time())))
    return _median(marks)


if __name__ == "__main__":
    worker() if "LOCAL_RANK" in os.environ else main()
