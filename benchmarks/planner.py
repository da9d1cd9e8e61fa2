"""The planner's closed form against its fake-tensor trace, on configurations that were drawn and not chosen.

``python -m benchmarks.planner --seed N`` prints the tables that ``benchmarks/results/planner.md`` holds. A seed is only
worth something if the closed form was not changed after its configurations had been seen: that file says which seeds
were. ``--tables`` chooses among ``grid``, ``stages``, ``tensor``, ``worlds``, ``resident``.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.planner_real import resident
from lightning_swift.planner.hardware import read_gpu
from lightning_swift.planner.memory import requested_peak
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.shape import read_config, read_shape
from lightning_swift.planner.states import share
from lightning_swift.planner.trace import depths_of, extend, run_requests, trace_request

MODELS = (
    *("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-7b", "llama-3-70b", "mistral-7b"),
    *("qwen3-0.6b", "qwen3-4b", "qwen3-14b", "qwen3-32b", "gemma-2-2b", "gemma-2-9b", "gemma-3-1b", "gemma-3-12b"),
)
# Configurations that one process traces: starting it costs as much as three of them.
_TOGETHER = 9
_LIMIT = 3600.0
Case = tuple[str, Job, Layout]


def draw(count: int, seed: int) -> list[Case]:
    """Random configurations of one rank or of FSDP2 on 8."""
    dice = random.Random(seed)
    gpu = read_gpu("h200")
    found = []
    for index in range(count):
        name = MODELS[index % len(MODELS)]
        goal = dice.choice(("full", "lora", "qlora"))
        precision = dice.choice(("bf16-true", "bf16-mixed"))
        sharded = goal != "qlora" and dice.random() < 0.3
        length = dice.choice((512, 1024, 1536, 2048, 4096, 6144, 8192, 16384, 32768))
        loss = dice.choice(("huggingface", "huggingface_kept", "chunked"))
        # Each chunk of a loss under FSDP2 reduces again: no recipe does that.
        loss = "huggingface" if sharded and loss == "chunked" else loss
        job = Job(
            read_shape(name),
            gpu,
            gpus=8 if sharded else 1,
            length=length,
            goal=goal,
            precision="bf16-mixed" if sharded else precision,
            optimizer=dice.choice(("adamw", "adamw_fused")),
            lora_r=dice.choice((4, 16, 64)),
            loss=loss,
            chunk=dice.choice((512, 1024)),
        )
        layout = Layout(
            "fsdp" if sharded else "ddp",
            batch=dice.choice((1, 1, 2, 3)) if length < 8192 else 1,
            checkpointing=dice.choice(("none", "selective", "full")),
            shard=8 if sharded else 1,
        )
        found.append((name, job, layout))
    return found


def compare(cases: list[Case]) -> Iterator[tuple[Case, float, float]]:
    """Bytes by the closed form and by the trace."""
    for start in range(0, len(cases), _TOGETHER):
        part = cases[start : start + _TOGETHER]
        requests = [
            trace_request(read_config(name)[1], job, layout, layers=depth)
            for name, job, layout in part
            for depth in depths_of(layout)
        ]
        results = run_requests(requests, limit=_LIMIT)
        for index, (name, job, layout) in enumerate(part):
            pair = [result["sections"] for result in results[2 * index : 2 * index + 2]]
            sections = extend(pair, list(depths_of(layout)), job.shape.layers)
            yield (name, job, layout), requested_peak(job, layout), max(sections.values())


def _grid(options: argparse.Namespace) -> None:
    table = _Table("model strategy goal precision optimizer length batch checkpointing loss")
    for (name, job, layout), closed, traced in compare(draw(options.count, options.seed)):
        what = [name, layout.strategy, job.goal, job.precision, job.optimizer, job.length, layout.batch]
        table.row([*what, layout.checkpointing, job.loss], closed, traced)
    table.summary()


def _stages(_: argparse.Namespace) -> None:
    """Pipelines of 2 to 16 stages, alone and with tensor parallelism and FSDP2 in each."""
    table = _Table("model stages tensor shard stage")
    gpu, cases = read_gpu("h200"), []
    for name, stages, stage, tensor, shard in (
        *(("llama-3-8b", 2, 0, 1, 1), ("llama-3-8b", 4, 3, 1, 1), ("llama-3-8b", 8, 3, 1, 1)),
        *(("llama-3-70b", 16, 0, 1, 1), ("llama-3-8b", 4, 0, 2, 1), ("llama-3-8b", 4, 3, 2, 1)),
        *(("llama-3-70b", 8, 0, 4, 8), ("llama-3-70b", 8, 4, 8, 2), ("llama-3-70b", 8, 7, 4, 8)),
    ):
        job = Job(read_shape(name), gpu, gpus=8, nodes=64, length=2048, optimizer="adamw_fused")
        layout = Layout(
            "tp_pp",
            batch=4 * stages,
            pipeline=stages,
            microbatches=4 * stages,
            checkpointing="full",
            tensor=tensor,
            shard=shard,
            sequence=tensor > 1,
            loss_parallel=tensor > 1,
        )
        cases.append((name, job, layout, stage))
    requests = [
        trace_request(read_config(n)[1], j, lay, layers=len(share(j, lay, at).kinds), stage=at)
        for n, j, lay, at in cases
    ]
    for (name, job, layout, stage), result in zip(cases, run_requests(requests, limit=_LIMIT), strict=True):
        what = [name, layout.pipeline, layout.tensor, layout.shard, stage]
        table.row(what, requested_peak(job, layout, stage), max(result["sections"].values()))
    table.summary()


def _tensor(_: argparse.Namespace) -> None:
    """Tensor parallelism over 2 to 8 ranks, with and without its sequence and loss parallelism and FSDP2 besides."""
    table = _Table("model ranks sequence+loss shard length checkpointing")
    gpu, cases = read_gpu("h200"), []
    for name, tensor, both, shard, length, mode in (
        *(("llama-3-8b", tensor, both, 1, 4096, "full") for tensor in (2, 4, 8) for both in (False, True)),
        *(("llama-3-8b", tensor, True, 1, 4096, "none") for tensor in (2, 8)),
        *(("qwen3-8b", 2, True, 1, 8192, "selective"), ("qwen3-4b", 4, True, 1, 2048, "full")),
        *(("llama-3-8b", 2, True, 4, 4096, "full"), ("llama-3-70b", 8, True, 8, 4096, "full")),
    ):
        job = Job(read_shape(name), gpu, gpus=8, nodes=8, length=length, optimizer="adamw_fused")
        switches: dict[str, Any] = {"checkpointing": mode, "sequence": both, "loss_parallel": both}
        cases.append((name, job, Layout("tp_pp", tensor=tensor, shard=shard, **switches)))
    for (name, job, layout), closed, traced in compare(cases):
        what = [name, layout.tensor, layout.sequence, layout.shard, job.length, layout.checkpointing]
        table.row(what, closed, traced)
    table.summary()


def _worlds(options: argparse.Namespace) -> None:
    table = _Table("model shard replicate")
    gpu, cases = read_gpu("h200"), []
    sizes = [(size, 1) for size in options.worlds] + [(8, max(options.worlds) // 8)]
    for shard, replicate in sizes:
        nodes = shard * replicate // 8
        job = Job(read_shape("llama-3-8b"), gpu, gpus=8, nodes=nodes, length=4096, optimizer="adamw_fused")
        cases.append(("llama-3-8b", job, Layout("fsdp", shard=shard, replicate=replicate, checkpointing="full")))
    for (name, _job, layout), closed, traced in compare(cases):
        table.row([name, layout.shard, layout.replicate], closed, traced)
    table.summary()


def _resident(_: argparse.Namespace) -> None:
    """Growth of the resident memory of real runs of small models on this CPU."""
    table = _Table("run", names=("closed", "traced", "resident growth"))
    for name, closed, traced, growth in resident():
        table.row([name, f"{closed / 2**30:.3f}"], traced, growth)
    table.summary()


class _Table:
    """Prints rows as they come, and what they say together."""

    def __init__(self, columns: str, names: tuple[str, ...] = ("closed", "trace")) -> None:
        self._errors: list[float] = []
        columns_ = [*columns.split(), *(f"{name} GiB" for name in names), "error"]
        print("\n| " + " | ".join(columns_) + " |")
        print("|" + "---|" * len(columns_))

    def row(self, what: list[Any], predicted: float, found: float) -> None:
        self._errors.append(100 * (predicted / found - 1))
        cells = [*what, f"{predicted / 2**30:.3f}", f"{found / 2**30:.3f}", f"{self._errors[-1]:+.2f} %"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)

    def summary(self) -> None:
        sizes = [abs(error) for error in self._errors]
        print(
            f"\n{len(sizes)} configurations: mean {sum(sizes) / len(sizes):.2f} %, worst {max(sizes):.2f} %", flush=True
        )


_TABLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "grid": _grid,
    "stages": _stages,
    "tensor": _tensor,
    "worlds": _worlds,
    "resident": _resident,
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=45)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 1024])
    parser.add_argument("--tables", nargs="+", choices=list(_TABLES), default=list(_TABLES))
    options = parser.parse_args()
    start = time.process_time()
    for name in options.tables:
        _TABLES[name](options)
    print(f"\n{time.process_time() - start:.0f} s of CPU time without the subprocesses")


if __name__ == "__main__":
    main()
