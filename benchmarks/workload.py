"""What the training benchmarks train: a random Llama, random tokens, one module and Trainer for all contenders."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(frozen=True)
class Workload:
    """Size of the model and of one rank's batch (in sequences of ``length`` tokens)."""

    hidden: int
    layers: int
    vocab: int
    batch: int
    length: int

    def config(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 64,
            vocab_size=self.vocab,
            max_position_embeddings=self.length,
            use_cache=False,
        )

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32).train()


class RandomTokens(Dataset[dict[str, Tensor]]):
    """``n`` fixed random sequences, the labels being the inputs."""

    def __init__(self, n: int, workload: Workload) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(0, workload.vocab, (n, workload.length), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.x[index], "labels": self.x[index]}


def loader(workload: Workload, steps: int, *, rank: int, world_size: int) -> DataLoader[Any]:
    """A loader of exactly ``steps`` batches for this rank."""
    dataset = RandomTokens(steps * workload.batch * world_size, workload)
    sampler: Any = DistributedSampler(dataset, world_size, rank, shuffle=False)
    return DataLoader(dataset, batch_size=workload.batch, sampler=sampler)


class Module(L.LightningModule):
    """The module a user would write; ``shard`` is where Lightning's ModelParallelStrategy wants FSDP2 applied."""

    def __init__(self, workload: Workload, *, shard: Any = None) -> None:
        super().__init__()
        self.workload = workload
        self.shard = shard
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.workload.model()
            if self.shard is not None:
                self.shard(self.model, self.device_mesh)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def quiet_trainer(strategy: Any, *, precision: Any = None, callbacks: Sequence[L.Callback] = ()) -> L.Trainer:
    """A Trainer on this rank's CPU that does nothing but train, for one epoch."""
    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )


def fit(
    module: L.LightningModule, data: Any, strategy: Any, *, tick: Callable[[], None], precision: Any = None
) -> None:
    """Train for one epoch; ``tick`` is called at the end of each step."""

    class Ticks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    quiet_trainer(strategy, precision=precision, callbacks=[Ticks()]).fit(module, data)
