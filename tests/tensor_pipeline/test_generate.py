"""``predict`` of CausalLM continues prompts under every layout as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_swift.models.causal_lm import CausalLM
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.models import quiet_trainer, tiny_model
from tests.harness.ranks import ranks

LAYOUTS: list[dict[str, Any]] = [
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
    {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "schedule": "ZBVZeroBubble", "microbatches": 2},
    {"pipeline_parallel_size": 1, "tensor_parallel_size": 2, "sequence_parallel": True, "loss_parallel": True},
]


class Prompts(Dataset[dict[str, Tensor]]):
    """Three prompts of unequal length, padded on the right."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(7) * 5 + 3 * index + 4
        mask = (torch.arange(7) < 7 - index).long()
        return {"input_ids": ids * mask, "attention_mask": mask}


def _folder(folder: Path) -> Path:
    model = tiny_model("llama", layers=4)
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that no two tokens are about equally likely.
            parameter.mul_(3)
    model.save_pretrained(folder)
    return folder


def _continued(folder: Path, **kwargs: Any) -> Any:
    trainer = quiet_trainer(**kwargs)
    (tokens,) = trainer.predict(CausalLM(folder, max_new_tokens=4), DataLoader(Prompts(), batch_size=3))
    return tokens


def test_prompts_are_continued_as_in_one_process(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    expected = _continued(folder, devices=1)
    assert expected.shape == (3, 11)
    on_two_ranks(folder, expected.tolist())


@ranks(2, deadline=60)
def on_two_ranks(folder: Path, expected: list[list[int]]) -> None:
    for layout in LAYOUTS:
        strategy = TensorPipelineStrategy("32-true", **layout)
        assert _continued(folder, strategy=strategy).tolist() == expected, layout
