"""What users have around a fit works under stages and cut layers: callbacks, optimizers, logs, failures."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_swift.errors import ModelError
from lightning_swift.strategies._failures import FailureWatch
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.ranks import RanksFailed, ranks
from tests.tensor_pipeline.runs import SHORT, FullModule, Numbers, plain, train
from tests.tensor_pipeline.test_fit import FIVE_DECIMALS, LAYERS, PP2

# How layers are cut is not what these tests are about.
BOTH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "microbatches": 2, "self_check": False}


def close(found: Numbers, expected: Numbers) -> bool:
    return max(abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)) <= FIVE_DECIMALS


class Frozen(FullModule):
    """The first two layers and the embedding, all of the first stage, do not train."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.model.named_parameters():
            if "embed" in name or "layers.0." in name or "layers.1." in name:
                parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3, eps=1e-5)


def test_clipping_by_value_and_stages_that_do_not_train(tmp_path: Path) -> None:
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    expected = train(FullModule("qwen3", layers=LAYERS), devices=1, **clip, **SHORT)
    frozen = train(Frozen("llama", layers=LAYERS), devices=1, **SHORT)
    values_on_four_ranks(expected, frozen, tmp_path)


@ranks(4)
def values_on_four_ranks(expected: Numbers, frozen: Numbers, folder: Path) -> None:
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", **SHORT}
    assert close(train(FullModule("qwen3", layers=LAYERS), TensorPipelineStrategy("32-true", **BOTH), **clip), expected)
    for options in (PP2, BOTH):
        strategy = TensorPipelineStrategy("32-true", stage_balance=[2, 2], **options)
        module = Frozen("llama", layers=LAYERS)
        assert close(train(module, strategy, **SHORT), frozen), options
        path = folder / f"{options['tensor_parallel_size']}.ckpt"
        module.trainer.save_checkpoint(path)
        resumed = TensorPipelineStrategy("32-true", stage_balance=[2, 2], **options)
        train(Frozen("llama", layers=LAYERS), resumed, ckpt_path=str(path), num_sanity_val_steps=0, max_steps=3)


class Logits(FullModule):
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self.model(**batch)
        loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("val_loss", loss, sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(input_ids=batch["input_ids"]).logits
        return logits.argmax(-1)


def halved(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of the user's own."""
    return 0.5 * nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


class ReadsLogits(FullModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).logits.mean()


def test_callbacks_logits_and_losses_of_the_user(tmp_path: Path) -> None:
    callbacks_on_four_ranks(plain("llama", layers=LAYERS, **SHORT), tmp_path)
    assert "val_loss" in next(tmp_path.glob("logs/**/metrics.csv")).read_text()


@ranks(4)
def callbacks_on_four_ranks(expected: Numbers, folder: Path) -> None:
    callbacks = [
        EarlyStopping("val_loss", patience=0, min_delta=10.0),
        ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=1),
        TQDMProgressBar(refresh_rate=1),
        LearningRateMonitor("step"),
    ]
    module = Logits("llama", layers=LAYERS)
    found = train(
        module,
        TensorPipelineStrategy("32-true", **BOTH, gather_logits=True, loss_parallel=True),
        callbacks=callbacks,
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=CSVLogger(folder, "logs"),
        max_steps=40,
    )
    # The second validation is no better by 10, so it stops there.
    assert module.trainer.global_step == 4
    assert found.validation[:2] == pytest.approx(expected.validation[:2], abs=FIVE_DECIMALS)
    assert Path(callbacks[1].best_model_path).is_dir()
    tokens = module.trainer.predict(module, module.val_dataloader())
    assert tokens[0].shape == (8, 32)
    with pytest.raises(ModelError, match="logits"):
        train(ReadsLogits("llama", layers=LAYERS), TensorPipelineStrategy("32-true", **PP2))
    for loss_fn in (halved, "tests.tensor_pipeline.test_trainer.halved"):
        module = FullModule("llama", layers=LAYERS)
        half = train(module, TensorPipelineStrategy("32-true", **PP2, loss_fn=loss_fn), max_steps=1)
        assert half.losses[0] == pytest.approx(expected.losses[0] / 2, abs=FIVE_DECIMALS)
        assert half.norms[0] == pytest.approx(expected.norms[0] / 2, abs=FIVE_DECIMALS)


class Fails(FullModule):
    """The last rank raises in its third step; the others wait for its activations."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and dist.get_rank() == 3:
            raise RuntimeError("the user's own mistake")
        return super().training_step(batch, batch_idx)


def test_a_failure_of_one_rank_ends_all_and_names_the_cause(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        fail_on_rank_three(tmp_path)
    # The rank that failed stays alive here, so the others would wait for the collective timeout of 20 s or more.
    assert time.monotonic() - begin < 60
    assert "died without a report (exit code 1)" in str(failure.value)
    for rank in range(4):
        text = (tmp_path / f"{rank}.log").read_text()
        assert "rank 3 (pipeline rank 1): RuntimeError: the user's own mistake" in text, rank


@ranks(4)
def fail_on_rank_three(folder: Path) -> None:
    handler = logging.FileHandler(folder / f"{dist.get_rank()}.log")
    logging.getLogger("lightning_swift.strategies._failures").addHandler(handler)
    FailureWatch.interval, FailureWatch.grace = 0.2, 0.5
    try:
        train(Fails("llama", layers=LAYERS), TensorPipelineStrategy("32-true", **PP2))
    finally:
        if dist.get_rank() == 3:
            # As a rank does that is busy writing a dump: its sockets stay open.
            time.sleep(5)
