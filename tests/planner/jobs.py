"""Questions to the planner, in a few words."""

from __future__ import annotations

from typing import Any

from lightning_swift.planner.hardware import read_gpu
from lightning_swift.planner.settings import Job
from lightning_swift.planner.shape import read_shape


def job(model: str | dict[str, Any], gpu: str = "a100-80", **changes: Any) -> Job:
    return Job(read_shape(model), read_gpu(gpu), **changes)


def tiny(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 688,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        **changes,
    }
