"""CausalLM: a loss that is exact over target tokens under every layout, weights read as slices, little memory."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_swift.data.chat import ChatDataModule
from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.models import Tokens, loader, quiet_trainer, save_tiny_model
from tests.harness.ranks import ranks
from tests.harness.tokenizers import tiny_tokenizer
from tests.tensor_pipeline.test_fit import BOTH, PP2, TP2

STEPS = 2


# How layers are cut has its own tests.
CUT = {**BOTH, "self_check": False}


class Uneven(Tokens):
    """Between 1 and 23 target tokens in a row; some rows have none, and so has the first batch of one rank."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.x[index].clone()
        labels[: 24 - (index * 7) % 24] = -100
        if index == 2:
            labels[:] = -100
        return {"input_ids": self.x[index], "labels": labels}


class Chatty(CausalLM):
    """Keeps the losses that are logged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        if "train_loss" in self.trainer.logged_metrics:
            self.losses.append(float(self.trainer.logged_metrics["train_loss"]))


class Recorder(Chatty):
    def share(self, dataset: Tokens) -> DataLoader[Any]:
        kwargs = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        count = kwargs["num_replicas"]
        return loader(dataset, batch_size=4 // count, rank=kwargs["rank"], world_size=count)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.share(Uneven(64, length=24))

    def val_dataloader(self) -> DataLoader[Any]:
        return self.share(Uneven(8, length=24, seed=3))


def losses(module: Chatty, data: Any = None, **kwargs: Any) -> list[float]:
    trainer = quiet_trainer(
        max_steps=STEPS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        val_check_interval=STEPS * 2,
        num_sanity_val_steps=0,
        **kwargs,
    )
    trainer.fit(module, datamodule=data)
    return [*module.losses, float(trainer.callback_metrics["val_loss"])]


def uneven(folder: Path, **kwargs: Any) -> list[float]:
    return losses(Recorder(folder, lr=5e-3, eps=1e-5, scheduler="cosine", warmup=1), **kwargs)


def test_the_loss_is_exact_however_tokens_are_spread(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "qwen3", layers=4)
    exact_on_four_ranks(folder, uneven(folder, devices=1))


@ranks(4)
def exact_on_four_ranks(folder: Path, expected: list[float]) -> None:
    for options in ({**PP2, "microbatches": 2}, {**CUT, "sequence_parallel": True, "microbatches": 3}):
        found = uneven(folder, strategy=TensorPipelineStrategy("32-true", **options))
        # Four steps of AdamW in float32, in another order of sums.
        assert found == pytest.approx(expected, abs=5e-6), options


def chats(folder: Path, **kwargs: Any) -> list[float]:
    """Three chats of unequal length in a batch, padded, most of their tokens without a target."""
    source = str(folder / "chats.jsonl")
    data = ChatDataModule(
        source, validation=source, batch_size=3, num_workers=0, max_length=128, cache_dir=str(folder / "cache")
    )
    return losses(Chatty(folder, lr=5e-3, eps=1e-5), data, **kwargs)


def test_chats_are_learnt_as_in_one_process(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama", layers=4, vocab=320)
    tiny_tokenizer().save_pretrained(folder)
    records = [
        {"messages": [{"role": "user", "content": "one " * n}, {"role": "assistant", "content": "Paris. " * (n % 5)}]}
        for n in range(1, 31)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    chats_on_two_ranks(folder, chats(folder, devices=1))


@ranks(2)
def chats_on_two_ranks(folder: Path, expected: list[float]) -> None:
    for options in ({**PP2, "schedule": "ZBVZeroBubble"}, {**TP2, "sequence_parallel": True, "self_check": False}):
        found = chats(folder, strategy=TensorPipelineStrategy("32-true", **options))
        # As above.
        assert found == pytest.approx(expected, abs=5e-6), options


class Peak(L.Callback):
    """The most anonymous memory that this process has had until the model stood, above what it had before."""

    def __init__(self) -> None:
        self.before = self.peak = anonymous()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self) -> None:
        while not self.done.is_set():
            self.peak = max(self.peak, anonymous())
            time.sleep(0.0005)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.done.set()
        self.thread.join()


def anonymous() -> int:
    """Bytes; pages of mapped files are not counted, which the system takes back at will."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


LARGE = {"hidden": 512, "layers": 8, "vocab": 4096}


def test_a_rank_loads_its_share_and_at_most_one_layer_more(tmp_path: Path) -> None:
    memory_on_four_ranks(save_tiny_model(tmp_path / "small", layers=4), save_tiny_model(tmp_path / "large", **LARGE))


@ranks(4)
def memory_on_four_ranks(small: Path, large: Path) -> None:
    # With the self-check, which takes a layer's memory.
    strategy = TensorPipelineStrategy("32-true", **BOTH)
    # What is imported and built once in a process is not the model's.
    uneven(small, strategy=strategy)
    peak = Peak()
    module = Recorder(large)
    trainer = quiet_trainer(strategy=TensorPipelineStrategy("32-true", **BOTH), max_steps=1, callbacks=[peak])
    trainer.fit(module, loader(Tokens(4, length=8), batch_size=4))
    own = sum(p.to_local().numel() * p.element_size() for p in module.parameters())  # type: ignore[attr-defined]
    layer = sum(p.numel() * 4 for p in module.model.stages[0].layers[0].parameters())
    # Besides: the parameters of AdamW are not made yet; Python's own objects of a larger model take a few MB.
    assert peak.peak - peak.before <= own + layer + 8 * 2**20, (peak.peak - peak.before, own, layer)
