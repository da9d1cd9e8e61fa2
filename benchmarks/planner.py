"""The planner's closed form against its fake-tensor trace, on configurations that were drawn and not chosen.

``python -m benchmarks.planner`` draws with a fixed seed that was not used while the closed form was written, and
prints the table that ``benchmarks/results/planner.md`` holds. ``--worlds`` adds FSDP2 groups of other sizes.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

from lightning_swift.planner.buffers import buffers
from lightning_swift.planner.hardware import read_gpu
from lightning_swift.planner.memory import requested_peak
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.shape import read_config, read_shape
from lightning_swift.planner.states import share
from lightning_swift.planner.trace import extend, run_requests, trace_request

MODELS = (
    *("smollm2-135m", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "llama-2-7b", "llama-3-70b", "mistral-7b"),
    *("qwen3-0.6b", "qwen3-4b", "qwen3-14b", "qwen3-32b", "gemma-2-2b", "gemma-2-9b", "gemma-3-1b", "gemma-3-12b"),
)
_DEPTHS = (2, 3)


def draw(count: int, seed: int) -> list[tuple[str, Job, Layout]]:
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


def compare(name: str, job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes by the closed form and by the trace."""
    config = read_config(name)[1]
    results = run_requests([trace_request(config, job, layout, layers=depth) for depth in _DEPTHS], limit=1800)
    sections = extend([result["sections"] for result in results], list(_DEPTHS), job.shape.layers)
    return requested_peak(job, layout), max(sections.values())


def compare_stage(name: str, job: Job, layout: Layout, stage: int) -> tuple[float, float]:
    """The same for one pipeline stage; weights that FSDP2 keeps gathered are not in that trace."""
    part = share(job, layout, stage)
    config = read_config(name)[1]
    request = trace_request(config, job, layout, layers=len(part.kinds), stage=stage)
    (result,) = run_requests([request], limit=1800)
    return requested_peak(job, layout, stage) - buffers(job, layout, part).always, max(result["sections"].values())


def _pipelines() -> list[tuple[str, Job, Layout, int]]:
    gpu = read_gpu("h200")
    cases = []
    for name, stages, stage in (
        ("llama-3-8b", 2, 0),
        ("llama-3-8b", 4, 3),
        ("llama-3-8b", 8, 3),
        ("llama-3-70b", 16, 0),
    ):
        job = Job(read_shape(name), gpu, gpus=8, nodes=2, length=2048, precision="bf16-true", optimizer="adamw_fused")
        layout = Layout("tp_pp", batch=4 * stages, pipeline=stages, microbatches=4 * stages, checkpointing="full")
        cases.append((name, job, layout, stage))
    return cases


def _worlds(sizes: list[int]) -> list[tuple[str, Job, Layout]]:
    gpu = read_gpu("h200")
    cases = []
    for size in sizes:
        job = Job(read_shape("llama-3-8b"), gpu, gpus=8, nodes=size // 8, length=4096, optimizer="adamw_fused")
        cases.append(("llama-3-8b", job, Layout("fsdp", shard=size, checkpointing="full")))
    return cases


def _row(what: list[Any], closed: float, traced: float, errors: list[float]) -> None:
    errors.append(100 * (closed / traced - 1))
    cells = [*what, f"{closed / 2**30:.3f}", f"{traced / 2**30:.3f}", f"{errors[-1]:+.2f} %"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _header(columns: str) -> None:
    names = columns.split()
    print("\n| " + " | ".join(names) + " | closed GiB | trace GiB | error |")
    print("|" + "---|" * (len(names) + 3))


def _summary(errors: list[float]) -> None:
    sizes = [abs(error) for error in errors]
    print(f"\n{len(errors)} configurations: mean {sum(sizes) / len(sizes):.2f} %, worst {max(sizes):.2f} %", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=45)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--worlds", type=int, nargs="*", default=[8, 64])
    options = parser.parse_args()
    start, errors = time.perf_counter(), []
    _header("model strategy goal precision optimizer length batch checkpointing loss")
    for name, job, layout in draw(options.count, options.seed):
        what = [name, layout.strategy, job.goal, job.precision, job.optimizer, job.length, layout.batch]
        _row([*what, layout.checkpointing, job.loss], *compare(name, job, layout), errors)
    _summary(errors)
    errors = []
    _header("model stages stage")
    for name, job, layout, stage in _pipelines():
        _row([name, layout.pipeline, stage], *compare_stage(name, job, layout, stage), errors)
    _summary(errors)
    errors = []
    _header("model ranks")
    for name, job, layout in _worlds(options.worlds):
        _row([name, layout.shard], *compare(name, job, layout), errors)
    _summary(errors)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
