"""The ShardedCheckpoint callback: the newest k by step, the last step, the best by a metric, one place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_swift.callbacks import ShardedCheckpoint
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.errors import CheckpointCorruptError, ConfigurationError
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from tests.checkpoint.runs import Scheduled, batches, digests, fit, mean_losses
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints in ``directory``; nothing else may lie there."""
    torch.distributed.barrier()
    entries = list(directory.iterdir())
    found = sorted(read_manifest(path).global_step for path in entries)
    assert sorted(path.name for path in entries) == sorted(f"step-{step}.ckpt" for step in found)
    torch.distributed.barrier()
    return found


def train(steps: int, *callbacks: L.Callback, module: Any = None, **kwargs: Any) -> L.Trainer:
    module = Scheduled(layers=1) if module is None else module
    return fit(module, steps=steps, callbacks=callbacks, enable_checkpointing=True, **kwargs)


@ranks(2)
def test_the_newest_are_kept_and_the_last_step_is_saved(tmp_path: Path) -> None:
    train(5, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=2))
    assert steps(tmp_path) == [4, 5]


@ranks(2)
def test_the_last_step_is_saved_where_it_is_not_due_unless_told_otherwise(tmp_path: Path) -> None:
    train(5, ShardedCheckpoint(str(tmp_path / "a"), every_n_train_steps=2, save_top_k=-1))
    assert steps(tmp_path / "a") == [2, 4, 5]
    train(5, ShardedCheckpoint(str(tmp_path / "b"), every_n_train_steps=2, save_top_k=-1, save_at_end=False))
    assert steps(tmp_path / "b") == [2, 4]


@ranks(2)
def test_without_an_interval_each_epoch_is_saved_and_resumes_exactly(tmp_path: Path) -> None:
    whole = Scheduled(layers=1)
    train(9, ShardedCheckpoint(str(tmp_path / "whole"), save_top_k=-1), module=whole)
    assert steps(tmp_path / "whole") == [3, 6, 9]
    later = Scheduled(layers=1)
    train(9, ShardedCheckpoint(str(tmp_path / "later")), module=later, ckpt_path=tmp_path / "whole" / "step-6.ckpt")
    assert mean_losses(later) == mean_losses(whole)[6:]


@ranks(2)
def test_a_fit_bounded_by_epochs_saves_its_end_once(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        strategy=FSDPBF16Strategy("32-true"),
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ShardedCheckpoint(str(tmp_path), every_n_train_steps=4)],
    )
    trainer.fit(Scheduled(layers=1), batches())
    assert steps(tmp_path) == [4, 6]


@ranks(2)
def test_the_best_by_a_logged_value_are_kept(tmp_path: Path) -> None:
    module = Scheduled(layers=1)
    train(6, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=2, monitor="loss"), module=module)
    losses = mean_losses(module)
    best = sorted(sorted(range(1, 7), key=lambda step: losses[step - 1])[:2])
    assert steps(tmp_path) == best


@ranks(2)
def test_the_next_start_of_the_same_script_goes_on_in_the_same_place(tmp_path: Path) -> None:
    os.chdir(tmp_path)
    whole = Scheduled(layers=1)
    expected = digests(train(6, module=whole))
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    train(3, ShardedCheckpoint(every_n_train_steps=3), ckpt_path="newest")
    assert steps(tmp_path / "checkpoints") == [3]
    later = Scheduled(layers=1)
    trainer = train(6, ShardedCheckpoint(every_n_train_steps=3), ckpt_path="newest", module=later)
    assert steps(tmp_path / "checkpoints") == [3, 6]
    assert mean_losses(later) == mean_losses(whole)[3:]
    assert digests(trainer) == expected
    assert len({read_manifest(path).run for path in (tmp_path / "checkpoints").iterdir()}) == 1


@ranks(2)
def test_retention_goes_on_after_a_resume_and_takes_in_what_a_crash_has_left(tmp_path: Path) -> None:
    train(4, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=-1))
    # As after a death between the commit of step 4 and the deletion of step 1: one more than the state knows.
    callback = ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=2)
    train(5, callback, ckpt_path="newest")
    assert steps(tmp_path) == [4, 5]
    assert sorted(int(step) for step in callback.best_k_models.values()) == [4, 5]


@ranks(2)
def test_the_checkpoint_that_a_fit_resumed_from_stays_until_the_next_resume(tmp_path: Path) -> None:
    for end, kept in ((2, [1, 2]), (5, [2, 4, 5]), (6, [5, 6])):
        train(end, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=2), ckpt_path="newest")
        assert steps(tmp_path) == kept


@ranks(2)
def test_a_newest_checkpoint_with_a_flipped_bit_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    train(2, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1))
    file = min((tmp_path / "step-2.ckpt").glob("*.distcp"))
    if torch.distributed.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointCorruptError, match=f"step-2.*{file.name}"):
        train(3, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1), ckpt_path="newest")
    assert steps(tmp_path) == [1, 2]


@ranks(2)
def test_another_run_in_the_same_directory_touches_nothing(tmp_path: Path) -> None:
    train(2, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=1))
    train(2, ShardedCheckpoint(str(tmp_path), every_n_train_steps=1, save_top_k=1))
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2-v1.ckpt", "step-2.ckpt"]


@pytest.mark.parametrize(
    ("options", "text"), [({"save_top_k": 0}, "save_top_k=0"), ({"every_n_train_steps": 0}, "every_n_train_steps=0")]
)
def test_options_that_save_nothing_are_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ShardedCheckpoint(**options)


def test_every_option_can_be_given_in_yaml() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.Callback, "callback")
    config = parser.parse_object(
        {
            "callback": {
                "class_path": "lightning_swift.callbacks.ShardedCheckpoint",
                "init_args": {"dirpath": "a", "every_n_train_steps": 100, "save_top_k": 2, "monitor": "loss"},
            }
        }
    )
    callback = parser.instantiate(config).callback
    assert isinstance(callback, ShardedCheckpoint)
    assert callback.save_top_k == 2
