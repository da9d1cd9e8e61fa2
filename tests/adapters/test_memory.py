"""A quantised model is read layer by layer: never much more than its packed weights is in memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swift.adapters.apply import apply_adapters
from lightning_swift.adapters.settings import AdapterSettings, LoraSettings
from lightning_swift.models.lazy import lazy_pretrained, load_lazy_weights
from lightning_swift.parallel.memory import returning_freed_memory
from tests.adapters.models import Holder
from tests.harness.models import tiny_config
from tests.harness.ranks import ranks

MIB = 2**20
SETTINGS = AdapterSettings(LoraSettings(r=1), "nf4")


def anonymous() -> float:
    """Memory of this process that no file backs, in MiB: pages of the mapped weights do not count."""
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Yields a dict that has the ``peak`` above the start and what is there ``after`` it, once the block has ended."""
    gc.collect()
    start, figures, stop = anonymous(), {"peak": 0.0}, threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            figures["peak"] = max(figures["peak"], anonymous() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield figures
    finally:
        stop.set()
        thread.join()
    gc.collect()
    figures["after"] = anonymous() - start


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """A model in BF16 of 98 MiB, and the sizes of all of it and of one block in MiB."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("large")
    config = tiny_config(hidden=1024, layers=5)
    config.intermediate_size = 2304
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        # Fast, and varied enough for every block of 64.
        parameter.data.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    model.save_pretrained(folder, max_shard_size="40MB")
    sizes = [sum(p.numel() for p in part.parameters()) * 2 / MIB for part in (model, model.model.layers[0])]
    return folder, sizes[0], sizes[1]


@ranks(1)
def test_the_peak_is_far_below_the_model(large: tuple[Path, float, float]) -> None:
    import bitsandbytes  # noqa: F401  # takes memory of its own
    import peft  # noqa: F401

    with returning_freed_memory():
        _check_peaks(*large)


def _check_peaks(folder: Path, whole: float, layer: float) -> None:
    with watched() as lazily:
        holder: Any = Holder(lazy_pretrained(folder))
        apply_adapters(holder, SETTINGS, compute_dtype=torch.bfloat16)
        load_lazy_weights(holder, device="cpu")
    assert lazily["peak"] <= 0.45 * whole + 2 * layer, lazily
    # Packed to 4.13 of 16 bits, apart from the little that stays.
    assert lazily["after"] <= 0.45 * whole, lazily
    del holder
    loaded = lazy_pretrained(folder, dtype="bfloat16")
    load_lazy_weights(loaded, device="cpu")
    with watched() as in_place:
        apply_adapters(Holder(loaded), SETTINGS, compute_dtype=torch.bfloat16)
    # Each whole weight is gone before the next one is quantised: if all stayed until the last, the peak would be more
    # than the packed model, which is 1.3 layers.
    assert in_place["peak"] <= layer, in_place
    assert in_place["after"] <= -0.55 * whole, in_place
