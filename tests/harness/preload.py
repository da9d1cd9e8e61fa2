"""What the server of ranks has loaded before it forks, so that no rank spends seconds on it.

Importing starts no threads and no process group; kernels and devices stay untouched.
"""

from __future__ import annotations

import functools
import gc
import importlib

import cpuinfo

MODULES = [
    "lightning.pytorch",
    "lightning.pytorch.cli",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    # An optimizer's first step imports it.
    "torch._dynamo",
    # Longest of all: a second of every rank that trains adapters.
    "peft",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "mixtral", "qwen3")),
    "lightning_swift.callbacks",
    "lightning_swift.checkpoint.export",
    "lightning_swift.data",
    "lightning_swift.models",
    "lightning_swift.strategies.auto",
    "lightning_swift.strategies.ddp",
    "lightning_swift.strategies.fsdp",
    "lightning_swift.strategies.tensor_pipeline",
    "lightning_swift.strategies.zero",
    "pytest",
    "tests.harness.models",
    "tests.harness.ranks",
]


def _load() -> None:
    for name in MODULES:
        importlib.import_module(name)
    # DeepSpeed asks it up to five times in each rank, and starts an interpreter for each answer.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    # A collection in a rank would write to, and so copy, every page that it shares with the server.
    gc.collect()
    gc.freeze()


_load()
