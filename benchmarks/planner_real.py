"""Real training steps of small models on this CPU, for the planner's table: how much resident memory grows.

As a child process: a request of the trace on standard input; growth and counted bytes on standard output.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_swift.planner.hardware import read_gpu
from lightning_swift.planner.memory import requested_peak
from lightning_swift.planner.settings import Job, Layout
from lightning_swift.planner.shape import read_shape
from lightning_swift.planner.trace import run_requests, trace_request

__all__ = ["growth_of", "resident"]

_SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1376,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_LARGER = {**_SMALL, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
# What the first pass through every kernel allocates once and keeps is none of the step's memory.
_WARM = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
_CHUNKED = {"length": 1024, "loss": "chunked", "chunk": 256}
_CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], Layout], ...] = (
    ("full", _SMALL, {"length": 256}, Layout("ddp")),
    ("full, checkpointing", _SMALL, {"length": 512}, Layout("ddp", batch=2, checkpointing="full")),
    ("chunked loss, checkpointing", _SMALL, _CHUNKED, Layout("ddp", checkpointing="full")),
    ("LoRA", _LARGER, {"length": 512, "goal": "lora"}, Layout("ddp")),
    ("LoRA, checkpointing", _LARGER, {"length": 512, "goal": "lora"}, Layout("ddp", batch=2, checkpointing="full")),
)


def resident() -> Iterator[tuple[str, float, float, float]]:
    """For each run its name, and bytes by the closed form, by the trace, and of the resident memory's growth."""
    gpu = read_gpu("h200")
    for name, config, changes, layout in _CASES:
        job = Job(read_shape(config), gpu, precision="32-true", optimizer="adamw_fused", **changes)
        layers = config["num_hidden_layers"]
        (traced,) = run_requests([trace_request(config, job, layout, layers=layers)])
        growth, _ = growth_of(trace_request(config, job, layout, layers=layers, fake=False))
        yield name, requested_peak(job, layout), max(traced["sections"].values()), growth


def growth_of(request: dict[str, Any]) -> tuple[int, int]:
    """Bytes by which resident memory grows in a fresh process that runs two real steps, and bytes that it counts."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner_real"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    growth, counted = json.loads(done.stdout.strip().splitlines()[-1])
    return growth, counted


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _child() -> None:
    from lightning_swift.parallel.memory import return_freed_memory

    return_freed_memory()
    import torch

    from lightning_swift.planner._trace_step import trace

    torch.set_num_threads(1)
    request = json.load(sys.stdin)
    trace({**request, "length": 32, "layers": 1, "config": {**request["config"], **_WARM}})
    gc.collect()
    before = _kilobytes("VmRSS")
    # Makes the kernel forget the peak so far.
    Path("/proc/self/clear_refs").write_text("5")
    counted = max(trace(request)["sections"].values())
    print(json.dumps([(_kilobytes("VmHWM") - before) * 1024, counted]))


if __name__ == "__main__":
    _child()
