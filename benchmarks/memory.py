"""Peak anonymous memory per rank of ``FSDPBF16Strategy`` beside Lightning's DDP, at 2 and 4 ranks.

Anonymous pages (``RssAnon``) are counted, not ``ru_maxrss``: the latter includes memory-mapped files. Each contender
runs in processes of its own; the figure is the growth above the process before the model is built.
``python -m benchmarks.memory``
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import report, table, torchrun
from benchmarks.workload import Module, Workload, loader, quiet_trainer

WORKLOAD = Workload(hidden=512, layers=14, vocab=16384, batch=2, length=64)
STEPS = 3
CONTENDERS = {
    "Lightning DDP, 32-true": ("ddp", "32-true"),
    "FSDPBF16Strategy, 32-true": ("ours", "32-true"),
    "FSDPBF16Strategy, bf16-mixed": ("ours", "bf16-mixed"),
}


def main() -> None:
    """Launch the workers and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    rows = []
    for ranks in args.ranks:
        peaks = {name: torchrun("benchmarks.memory", ranks, list(how)) for name, how in CONTENDERS.items()}
        base = peaks["Lightning DDP, 32-true"]
        rows += [(name, str(ranks), f"{peak / 1e6:.0f}", f"{peak / base:.2f}") for name, peak in peaks.items()]
    table(
        "Peak anonymous memory above the base process, largest rank",
        ["contender", "ranks", "MB per rank", "ratio to DDP"],
        rows,
    )


def worker() -> None:
    """Train a few steps in this rank and report the largest peak of all ranks."""
    import sys

    import torch
    import torch.distributed as dist
    import transformers.models.llama.modeling_llama  # noqa: F401  # part of the base process

    kind, precision = sys.argv[1:3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    strategy: Any = "ddp"
    if kind == "ours":
        from lightning_swift import FSDPBF16Strategy

        strategy = FSDPBF16Strategy(precision=precision)
    trainer = quiet_trainer(strategy)
    base = _anonymous()
    with _Peak() as peak:
        data = loader(WORKLOAD, STEPS, rank=dist.get_rank(), world_size=dist.get_world_size())
        trainer.fit(Module(WORKLOAD), data)
    growth = torch.tensor([peak.value - base])
    dist.all_reduce(growth, op=dist.ReduceOp.MAX)
    report(int(growth))
    # No rank leaves while another one still waits for it.
    dist.barrier()
    dist.destroy_process_group()


class _Peak:
    """Largest anonymous memory while the block runs, sampled every 5 ms."""

    def __init__(self) -> None:
        self.value = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.value = max(self.value, _anonymous())
            time.sleep(0.005)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("RssAnon is not in /proc/self/status; this benchmark needs Linux")


if __name__ == "__main__":
    worker() if "LOCAL_RANK" in os.environ else main()
