"""Tensor parallelism over two ranks gives the loss and every gradient of the single process."""

from __future__ import annotations

import time

import pytest

from lightning_swift.parallel.tensor import TensorParallelSettings
from tests.harness.ranks import ranks
from tests.tensor.cases import batch, compare, maker

KINDS = ["llama", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt_neox", "mixtral", "qwen3_moe"]


@ranks(2)
def check_kinds(kinds: list[str], settings: TensorParallelSettings) -> None:
    for kind in kinds:
        t = time.time()
        # Two batches: what transformers does for q_norm and k_norm counts the first one twice (trap 3).
        report = compare(maker(kind), settings, batches=[batch(), batch(seed=4)])
        print(kind, time.time() - t, sorted({n.split(".", 3)[-1] for n in report.partial}), flush=True)


@pytest.mark.parametrize("kind", KINDS)
def test_plain(kind: str) -> None:
    check_kinds([kind], TensorParallelSettings())


@pytest.mark.parametrize("kind", KINDS)
def test_sequence(kind: str) -> None:
    check_kinds([kind], TensorParallelSettings(sequence_parallel=True, loss_parallel=True))
