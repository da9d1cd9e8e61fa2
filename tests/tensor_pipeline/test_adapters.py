"""LoRA under stages and cut layers: adapters that the strategy puts in, and those of the user's own making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import FullModule, Numbers, train
from tests.tensor_pipeline.test_fit import BOTH, FIVE_DECIMALS, LAYERS, PP2

LORA = LoraSettings(r=4, alpha=8.0)


class UserLora(FullModule):
    """peft adapters that configure_model puts in."""

    def configure_model(self) -> None:
        if self.model is not None:
            return
        import torch
        from peft import LoraConfig, get_peft_model

        super().configure_model()
        torch.manual_seed(7)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        self.model = get_peft_model(self.model, config)


def assert_close(found: Numbers, expected: Numbers, options: Any) -> None:
    errors = [abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)]
    assert max(errors) <= FIVE_DECIMALS, (options, found, expected)


def test_adapters_of_the_strategy(tmp_path: Path) -> None:
    expected = reference()
    on_four_ranks(expected, tmp_path / "lora.ckpt")
    manifest = read_manifest(tmp_path / "lora.ckpt")
    assert manifest.adapters is not None
    assert all(".stages." not in name for name in manifest.tensors)
    assert {name for name in manifest.tensors if "lora_" in name} == set(saved_by_one_rank(tmp_path / "one.ckpt"))


@ranks(1)
def reference() -> Numbers:
    return train(FullModule("llama", layers=LAYERS), FSDPBF16Strategy("32-true", lora=LORA))


@ranks(1)
def saved_by_one_rank(path: Path) -> list[str]:
    module = FullModule("llama", layers=LAYERS)
    train(module, FSDPBF16Strategy("32-true", lora=LORA), max_steps=1)
    module.trainer.save_checkpoint(path)
    return [name for name in read_manifest(path).tensors if "lora_" in name]


@ranks(4, deadline=60)
def on_four_ranks(expected: Numbers, path: Path) -> None:
    for options in ({**PP2, "schedule": "ZBVZeroBubble"}, BOTH, {**BOTH, "sequence_parallel": True}):
        module = FullModule("llama", layers=LAYERS)
        assert_close(train(module, TensorPipelineStrategy("32-true", lora=LORA, **options)), expected, options)
    module.trainer.save_checkpoint(path)


@pytest.mark.filterwarnings("ignore:Module ... LoraModel")
def test_adapters_of_the_user() -> None:
    user_on_four_ranks(train(UserLora("qwen3", layers=LAYERS), devices=1))


@ranks(4, deadline=60)
def user_on_four_ranks(expected: Numbers) -> None:
    for options in ({**PP2, "schedule": "Interleaved1F1B"}, BOTH):
        found = train(UserLora("qwen3", layers=LAYERS), TensorPipelineStrategy("32-true", **options))
        assert_close(found, expected, options)
