"""A resumed fit with accumulation leaves the checkpoint it began from alone, and can begin from it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_swift.callbacks import ShardedCheckpoint
from lightning_swift.checkpoint.layout import MANIFEST
from tests.checkpoint.runs import digests, fit, rank, world_size
from tests.harness.models import Tokens, UserModule, loader
from tests.harness.ranks import ranks


def saver(kind: str, folder: Path) -> Any:
    if kind == "ours":
        return ShardedCheckpoint(str(folder), every_n_train_steps=3, save_top_k=-1)
    return ModelCheckpoint(
        folder, filename="step-{step}", auto_insert_metric_name=False, every_n_train_steps=3, save_top_k=-1
    )


@ranks(2)
@pytest.mark.parametrize("kind", ["ours", "lightning's"])
def test_the_step_resumed_from_is_not_saved_again_in_mid_accumulation(kind: str, tmp_path: Path) -> None:
    # Six microbatches an epoch: step 3 lies at its edge, where a plain DataLoader resumes at the right sample.
    data = loader(Tokens(48), batch_size=4, rank=rank(), world_size=world_size())
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "enable_checkpointing": True, "data": data}
    straight = digests(fit(UserModule(layers=1), steps=5, **options, callbacks=[saver(kind, tmp_path / "straight")]))
    folder = tmp_path / "stopped"
    fit(UserModule(layers=1), steps=3, **options, callbacks=[saver(kind, folder)])
    first = folder / "step-3.ckpt"
    manifest = (first / MANIFEST).read_bytes()
    for _ in range(2):
        resumed = fit(UserModule(layers=1), steps=5, ckpt_path=first, **options, callbacks=[saver(kind, folder)])
        assert digests(resumed) == straight
        assert (first / MANIFEST).read_bytes() == manifest
        assert not list(folder.glob("step-3-*"))
