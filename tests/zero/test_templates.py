"""The shipped configurations train with DeepSpeed alone and with the Trainer of Hugging Face, as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from lightning_swift._shipped import shipped_folder
from lightning_swift.strategies._zero_engine import choose_accelerator
from tests.harness.ranks import ranks

pytestmark = pytest.mark.usefixtures("ops")

# z3_nvme needs libaio, which is not everywhere; it differs from z3_offload by where the optimizer's state lies.
TEMPLATES = [
    path for path in sorted((shipped_folder("configs") / "deepspeed").glob("*.json")) if path.stem != "z3_nvme"
]
STEPS = 2


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The same sequence again and again."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(3, 19)
        return {"input_ids": tokens, "labels": tokens}


def by_deepspeed(config: dict[str, Any], folder: str) -> list[float]:
    import deepspeed
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    losses = []
    for _ in range(STEPS):
        batch = {name: tokens[None] for name, tokens in Rows()[0].items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    return losses


def by_hugging_face(path: Path, folder: str, output: str) -> list[float]:
    from accelerate.state import AcceleratorState
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    arguments = TrainingArguments(
        output_dir=output,
        deepspeed=str(path),
        use_cpu=True,
        bf16=True,
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(folder), args=arguments, train_dataset=Rows())
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@ranks(2, deadline=120)
def trained(folder: str, output: str) -> None:
    choose_accelerator("cpu")
    first = None
    for path in TEMPLATES:
        losses = by_deepspeed(json.loads(path.read_text()), folder)
        first = first or losses
        # BF16 knows a loss of 5.5 to 0.02.
        assert losses == pytest.approx(first, abs=0.02), path.stem
        assert by_hugging_face(path, folder, output) == pytest.approx(first, abs=0.02), path.stem
    assert first is not None
    assert first[-1] < first[0] - 0.05
    assert dist.get_world_size() == 2


def test_they_train_without_this_package(folder: str, tmp_path: Path) -> None:
    trained(folder, str(tmp_path))
