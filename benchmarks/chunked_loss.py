"""``CausalLM(loss="chunked")`` beside the model's own loss and torch's ``linear_cross_entropy``: memory and time.

``python -m benchmarks.chunked_loss``: one process, one model with the vocabulary of Llama 3, forward and backward
pass. Memory is what operators allocate above the weights, counted as the planner's trace counts it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear_cross_entropy, pad
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.launch import table
from lightning_swift.models._chunked_loss import compute_loss_in_chunks
from lightning_swift.planner._trace_events import StorageEvents

_SIZES = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 8}
_VOCABULARY = 128256

Batch = dict[str, torch.Tensor]


def _model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**_SIZES, vocab_size=_VOCABULARY)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def _whole(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch, use_cache=False).loss
    return loss


def _torch(chunk: int) -> Callable[[Any, Batch], torch.Tensor]:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def loss(model: Any, batch: Batch) -> torch.Tensor:
        hidden = model.model(batch["input_ids"], use_cache=False).last_hidden_state.flatten(0, 1)
        targets = pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
        return linear_cross_entropy(hidden, model.lm_head.weight, targets, options=options)

    return loss


def _measure(model: Any, loss: Callable[[Any, Batch], torch.Tensor], batch: Batch, rounds: int) -> tuple[float, ...]:
    """Peak bytes, CPU seconds, loss."""
    with StorageEvents() as events:
        events.restart()
        value = loss(model, batch)
        value.backward()
        sections = events.finish()
    seconds = []
    for _ in range(rounds):
        model.zero_grad()
        start = time.process_time()
        loss(model, batch).backward()
        seconds.append(time.process_time() - start)
    return max(sections.values()), statistics.median(seconds), float(value.detach())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    ids = torch.randint(0, _VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    chunked = _model()
    compute_loss_in_chunks(chunked, options.chunk)
    contenders = [("all logits at once", _model(), _whole), ("loss='chunked'", chunked, _whole)]
    contenders.append(("torch's linear_cross_entropy", _model(), _torch(options.chunk)))
    rows = []
    for name, model, loss in contenders:
        peak, seconds, value = _measure(model, loss, batch, options.rounds)
        rows.append((name, f"{peak / 2**20:.0f}", f"{seconds:.2f}", f"{value:.4f}"))
    title = f"{options.tokens} tokens, {_VOCABULARY} words, BF16, chunks of {options.chunk}"
    table(title, ("loss", "peak MiB above the weights", "CPU s", "value"), rows)


if __name__ == "__main__":
    main()
