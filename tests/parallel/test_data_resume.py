"""A run that stops and resumes trains on the same samples, in the same order, as one that never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_swift.data.chat import ChatDataModule
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks, run_ranks
from tests.harness.tokenizers import tiny_tokenizer

RECORDS = 22
BATCH = 2


def write_records(path: Path, n: int = RECORDS) -> str:
    """``n`` records whose third byte is their number, so that a batch tells which records it holds."""
    path.write_text("".join(json.dumps({"text": f"a{chr(65 + i)}"}) + "\n" for i in range(n)))
    return str(path)


def numbers(batch: dict[str, Tensor], tokenizer: Any) -> list[int]:
    return [ord(tokenizer.decode(row[:2])[1]) - 65 for row in batch["input_ids"]]


class Recorder(L.LightningModule):
    """Trains one weight and keeps the record numbers of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = tiny_tokenizer()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []
        self.indices: list[tuple[int, int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(numbers(batch, self.tokenizer))
        self.indices.append((self.trainer.current_epoch, batch_idx))
        return self.weight * batch["labels"].shape[1]

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.weight, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Saves once, at ``step``, from the hook named."""

    def __init__(self, path: Path, step: int, hook: str) -> None:
        self.path, self.step, self.hook = path, step, hook

    def _save(self, trainer: L.Trainer, hook: str) -> None:
        if hook == self.hook and trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "epoch")

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._save(trainer, "end")


def fit(
    folder: Path, limits: dict[str, Any], *, save: tuple[str, int] | None = None, resume: bool = False, **data: Any
) -> tuple[Recorder, ChatDataModule]:
    """One run; ``save`` names the hook and step to save at, ``resume`` starts from what was saved."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    path = folder / "saved.ckpt"
    module = Recorder()
    if data.pop("with_validation", False):
        data["validation"] = str(folder / "data.jsonl")
    loader_settings: dict[str, Any] = {"max_length": 16, "batch_size": BATCH, "num_workers": 0}
    chat = ChatDataModule(str(folder / "data.jsonl"), cache_dir=str(folder / "cache"), **{**loader_settings, **data})
    callbacks = [] if save is None else [SaveAt(path, save[1], save[0])]
    trainer = quiet_trainer(callbacks=callbacks, num_sanity_val_steps=0, use_distributed_sampler=True, **limits)
    trainer.fit(module, chat, ckpt_path=str(path) if resume else None)
    assert rank >= 0
    return module, chat


def whole_batches(module: Recorder) -> list[list[int]]:
    """The records of each step, of all ranks together in rank order."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return module.seen
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, module.seen)
    return [sum(parts, []) for parts in zip(*gathered, strict=True)]


# 22 records in batches of 2 are 11 batches an epoch; 25 steps reach into the third epoch.
STOPS = [
    pytest.param("batch", 4, {"max_steps": 4}, id="mid-epoch"),
    pytest.param("batch", 11, {"max_steps": 12}, id="last-batch-of-epoch"),
    pytest.param("epoch", 11, {"max_epochs": 1}, id="epoch-end"),
    pytest.param("epoch", 11, {"max_steps": 11}, id="epoch-end-by-steps"),
    pytest.param("epoch", 22, {"max_epochs": 2}, id="second-epoch-end"),
    pytest.param("end", 11, {"max_steps": 11}, id="fit-end-at-epoch-end"),
    pytest.param("end", 14, {"max_steps": 14}, id="fit-end-mid-epoch"),
    pytest.param("batch", 15, {"max_epochs": 2}, id="second-epoch"),
    pytest.param("validation", 11, {"max_epochs": 1}, id="validation-at-epoch-end"),
    pytest.param("validation", 16, {"max_epochs": 2, "val_check_interval": 5}, id="validation-mid-epoch"),
]
GOALS = [pytest.param({"max_steps": 25}, id="to-steps"), pytest.param({"max_epochs": 3}, id="to-epochs")]


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("hook", "step", "stop"), STOPS)
@pytest.mark.parametrize("with_validation", [False, True], ids=["no-val", "val"])
def test_stopped_and_resumed_equals_straight(
    tmp_path: Path, hook: str, step: int, stop: dict[str, Any], goal: dict[str, Any], with_validation: bool
) -> None:
    if hook == "validation" and not with_validation:
        pytest.skip("nothing is saved without a validation")
    write_records(tmp_path / "data.jsonl")
    every = {"val_check_interval": stop["val_check_interval"]} if "val_check_interval" in stop else {}
    straight, straight_data = fit(tmp_path, {**goal, **every}, with_validation=with_validation)
    first, _ = fit(tmp_path, stop, save=(hook, step), with_validation=with_validation)
    second, second_data = fit(tmp_path, {**goal, **every}, resume=True, with_validation=with_validation)
    assert first.seen[:step] + second.seen == straight.seen
    assert first.indices[:step] + second.indices == straight.indices
    assert second_data.samples_seen == straight_data.samples_seen == len(straight.seen) * BATCH
