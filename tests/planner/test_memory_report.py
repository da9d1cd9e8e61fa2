"""``MemoryReport`` on a CPU: what it asks the planner, what it keeps, what it says when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_swift import CausalLM, DDPBF16Strategy, recommend
from lightning_swift.callbacks import ActivationCheckpointing, MemoryReport
from tests.harness.ranks import ranks
from tests.planner.jobs import tiny


def batches() -> torch.utils.data.DataLoader[Any]:
    rows = [{"input_ids": torch.arange(32), "labels": torch.arange(32)} for _ in range(4)]
    return torch.utils.data.DataLoader(rows, batch_size=2)


class Exhausted(CausalLM):
    """Runs out of memory in its first step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


def trainer(strategy: Any, report: MemoryReport) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=1,
        callbacks=[report, ActivationCheckpointing("full")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@ranks(1)
def test_a_run_is_predicted_recorded_and_explained() -> None:
    import os
    import tempfile
    import warnings

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIGHTNING_SWIFT_CALIBRATION"] = str(Path(folder) / "memory.json")
        report = MemoryReport()
        module = CausalLM(tiny(), optimizer="adamw_fused", loss="chunked", loss_chunk=16)
        trainer(DDPBF16Strategy(), report).fit(module, batches())
        assert report.predicted is not None
        assert report._asked is not None
        job, layout = report._asked
        assert (layout.strategy, layout.batch, layout.checkpointing) == ("ddp", 2, "full")
        assert (job.length, job.goal, job.precision) == (32, "full", "bf16-mixed")
        assert (job.optimizer, job.loss, job.chunk) == ("adamw_fused", "chunked", 16)
        # No GPU, no measurement.
        assert not (Path(folder) / "memory.json").exists()
        report.keep(1.1 * report.predicted.requested)
        (record,) = json.loads((Path(folder) / "memory.json").read_text())
        assert record["measured"] == pytest.approx(1.1 * record["predicted"])

        report = MemoryReport()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with pytest.raises(torch.OutOfMemoryError):
                trainer(DDPBF16Strategy(), report).fit(Exhausted(tiny()), batches())
        text = "\n".join(str(warning.message) for warning in caught)
        assert "predicted peak" in text
        assert "optimizer" in text


@ranks(1)
def test_swift_auto_hands_over_to_what_the_planner_chooses() -> None:
    report = MemoryReport()
    run = trainer("swift_auto", report)
    given = run.strategy
    run.fit(CausalLM(tiny()), batches())
    # The same object, so that whoever held it before has the strategy that runs.
    assert run.strategy is given
    assert type(run.strategy) is DDPBF16Strategy
    assert run.global_step == 1


def test_recommend_builds_the_strategy() -> None:
    strategy: Any = recommend("llama-3-8b", 8, gpu="a100-80", max_length=4096)
    assert type(strategy).__name__ == "FSDPBF16Strategy"
    small: Any = recommend("llama-3-8b", 1, gpu="a10")
    assert small.adapters.quantization == "nf4"
    assert small.activation_checkpointing.mode == "full"
