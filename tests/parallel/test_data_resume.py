"""A run that stops and resumes trains on the same samples, in the same order, as one that never stopped."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_swift.data.chat import ChatDataModule
from lightning_swift.data.sampler import DataOrder
from lightning_swift.errors import DataError
from tests.harness.models import quiet_trainer
from tests.harness.ranks import run_ranks
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

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validating(Recorder):
    """Takes part in validation, which changes the path by which Lightning resumes."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", self.weight, sync_dist=True)


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
    folder: Path,
    limits: dict[str, Any],
    *,
    save: tuple[str, int] | None = None,
    resume: bool = False,
    validate: bool = False,
    **data: Any,
) -> tuple[Recorder, ChatDataModule]:
    """One run; ``save`` names the hook and step to save at, ``resume`` starts from what was saved."""
    path = folder / "saved.ckpt"
    module = Validating() if validate else Recorder()
    source = str(folder / "data.jsonl")
    settings: dict[str, Any] = {"max_length": 16, "batch_size": BATCH, "num_workers": 0, **data}
    chat = ChatDataModule(source, validation=source if validate else None, cache_dir=str(folder / "cache"), **settings)
    callbacks = [] if save is None else [SaveAt(path, save[1], save[0])]
    trainer = quiet_trainer(callbacks=callbacks, num_sanity_val_steps=0, use_distributed_sampler=True, **limits)
    trainer.fit(module, chat, ckpt_path=str(path) if resume else None)
    return module, chat


def whole_batches(module: Recorder) -> list[list[int]]:
    """The records of each step, of all ranks together in rank order."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return module.seen
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, module.seen)
    return [list(itertools.chain(*parts)) for parts in zip(*gathered, strict=True)]


# 22 records in batches of 2 are 11 batches an epoch; 25 steps reach into the third epoch.
_STOPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mid-epoch": ("batch", 4, {"max_steps": 4}),
    "last-batch-of-epoch": ("batch", 11, {"max_steps": 12}),
    "epoch-end": ("epoch", 11, {"max_epochs": 1}),
    "epoch-end-by-steps": ("epoch", 11, {"max_steps": 11}),
    "second-epoch-end": ("epoch", 22, {"max_epochs": 2}),
    "fit-end-at-epoch-end": ("end", 11, {"max_steps": 11}),
    "fit-end-mid-epoch": ("end", 14, {"max_steps": 14}),
    "second-epoch": ("batch", 15, {"max_epochs": 2}),
}
_VALIDATION_STOPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "validation-at-epoch-end": ("validation", 11, {"max_epochs": 1}),
    "validation-mid-epoch": ("validation", 16, {"max_epochs": 2, "val_check_interval": 5}),
}
STOPS = [pytest.param(*stop, False, id=f"{name}-no-val") for name, stop in _STOPS.items()]
STOPS_WITH_VALIDATION = [
    pytest.param(*stop, True, id=f"{name}-val") for name, stop in {**_STOPS, **_VALIDATION_STOPS}.items()
]
GOALS = [pytest.param({"max_steps": 25}, id="to-steps"), pytest.param({"max_epochs": 3}, id="to-epochs")]


Straight = Callable[[dict[str, Any], bool], tuple[Recorder, ChatDataModule]]


@pytest.fixture(scope="module")
def straight_run(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Runs that never stop; those with equal limits are one."""
    folder, found = tmp_path_factory.mktemp("straight"), {}
    write_records(folder / "data.jsonl")

    def run(limits: dict[str, Any], validate: bool) -> tuple[Recorder, ChatDataModule]:
        key = (*sorted(limits.items()), validate)
        if key not in found:
            found[key] = fit(folder, limits, validate=validate)
        return found[key]

    return run


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize(("hook", "step", "stop", "validate"), [*STOPS, *STOPS_WITH_VALIDATION])
def test_stopped_and_resumed_equals_straight(
    tmp_path: Path,
    straight_run: Straight,
    hook: str,
    step: int,
    stop: dict[str, Any],
    validate: bool,
    goal: dict[str, Any],
) -> None:
    write_records(tmp_path / "data.jsonl")
    every = {"val_check_interval": stop["val_check_interval"]} if "val_check_interval" in stop else {}
    straight, straight_data = straight_run({**goal, **every}, validate)
    first, _ = fit(tmp_path, stop, save=(hook, step), validate=validate)
    second, second_data = fit(tmp_path, {**goal, **every}, resume=True, validate=validate)
    assert first.seen[:step] + second.seen == straight.seen
    assert first.indices[:step] + second.indices == straight.indices
    assert second_data.samples_seen == straight_data.samples_seen == len(straight.seen) * BATCH


def test_a_limit_on_batches_ends_the_epoch_for_the_resumed_run_too(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl")
    limit = {"limit_train_batches": 4}
    straight, _ = fit(tmp_path, {"max_epochs": 3, **limit})
    for hook, step in (("batch", 3), ("batch", 4), ("epoch", 4), ("batch", 6)):
        fit(tmp_path, {"max_epochs": 2, **limit}, save=(hook, step))
        resumed, _ = fit(tmp_path, {"max_epochs": 3, **limit}, resume=True)
        assert resumed.seen == straight.seen[step:], (hook, step)


def test_each_epoch_trains_on_other_records_in_another_order_and_never_twice_on_one(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl", 23)
    module, _ = fit(tmp_path, {"max_epochs": 2})
    epochs = [list(itertools.chain(*module.seen[:11])), list(itertools.chain(*module.seen[11:]))]
    assert all(len(set(epoch)) == 22 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_without_shuffling_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl", 6)
    module, _ = fit(tmp_path, {"max_epochs": 2}, shuffle=False)
    assert module.seen == [[0, 1], [2, 3], [4, 5]] * 2


def test_workers_draw_ahead_and_are_not_counted(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl")
    straight, _ = fit(tmp_path, {"max_steps": 16})
    first, data = fit(tmp_path, {"max_steps": 4}, save=("batch", 4), num_workers=2)
    assert data.samples_seen == 8
    # The resumed loader draws its first batches before Lightning tells the sampler which epoch it is.
    second, _ = fit(tmp_path, {"max_steps": 16}, resume=True, num_workers=2)
    assert first.seen + second.seen == straight.seen


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}])
def test_another_order_is_refused_on_resume(tmp_path: Path, change: dict[str, Any]) -> None:
    write_records(tmp_path / "data.jsonl")
    fit(tmp_path, {"max_steps": 4}, save=("batch", 4))
    with pytest.raises(DataError, match=r"The checkpoint was made with .*Resume with the same data, seed and shuffle"):
        fit(tmp_path, {"max_steps": 8}, resume=True, **change)


def test_other_records_are_refused_on_resume(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl")
    fit(tmp_path, {"max_steps": 4}, save=("batch", 4))
    write_records(tmp_path / "data.jsonl", RECORDS + 1)
    with pytest.raises(DataError, match=r"records=22.*records=23"):
        fit(tmp_path, {"max_steps": 8}, resume=True)


def run_on(folder: Path, limits: dict[str, Any], kwargs: dict[str, Any]) -> tuple[list[list[int]], int]:
    """What a run trained on, global batch by global batch, and its ``samples_seen``."""
    module, data = fit(folder, {"strategy": "ddp", **limits}, **kwargs)
    return whole_batches(module), data.samples_seen


def on(n: int, folder: Path, limits: dict[str, Any], **kwargs: Any) -> tuple[list[list[int]], int]:
    result: tuple[list[list[int]], int] = run_ranks(run_on, n, (folder, limits, kwargs), deadline=120)
    return result


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def test_two_ranks_read_the_order_of_one(tmp_path: Path) -> None:
    write_records(tmp_path / "data.jsonl")
    one, seen_by_one = on(1, tmp_path, {"max_epochs": 2}, batch_size=4)
    two, seen_by_two = on(2, tmp_path, {"max_epochs": 2}, batch_size=2)
    assert two == one
    assert seen_by_one == seen_by_two == 40


@pytest.mark.parametrize(("before", "after", "step"), [(2, 2, 3), (2, 1, 3), (1, 2, 3), (2, 1, 5), (1, 2, 11)])
def test_resuming_on_other_ranks_goes_on_with_the_next_sample(
    tmp_path: Path, before: int, after: int, step: int
) -> None:
    # 22 records: 5 whole batches of 2 x 2 an epoch on two ranks, 11 of 2 on one; step 5 and 11 are the epoch's last.
    write_records(tmp_path / "data.jsonl")
    first, _ = on(before, tmp_path, {"max_epochs": 1}, save=("batch", step))
    second, seen_after = on(after, tmp_path, {"max_epochs": 3}, resume=True)
    order = [DataOrder(RECORDS).epoch(epoch) for epoch in range(3)]
    trained = step * before * BATCH
    batch = after * BATCH
    # The rest of the first epoch in whole batches, then all whole batches of each later one.
    rest = order[0][trained:] if RECORDS - trained >= before * BATCH else []
    expected = [epoch[: len(epoch) // batch * batch] for epoch in (rest, order[1], order[2])]
    assert flat(first)[:trained] == order[0][:trained]
    assert flat(second) == flat(expected)
    assert all(len(records) == batch for records in second)
    assert seen_after == trained + len(flat(second))
