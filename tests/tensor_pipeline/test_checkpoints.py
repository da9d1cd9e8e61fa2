"""Saved under one layout, resumed under any other, merged to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_swift.callbacks import ExportForInference, MergeShardedCheckpoint, ShardedCheckpoint
from lightning_swift.checkpoint.layout import read_manifest
from lightning_swift.checkpoint.merge import merge_checkpoint
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.exports import reload_here
from tests.harness.models import quiet_trainer
from tests.harness.ranks import ranks
from tests.tensor_pipeline.runs import SHORT, FullModule, Numbers, train
from tests.tensor_pipeline.test_fit import BOTH, FIVE_DECIMALS, LAYERS, PP2

# Of two steps.
HALF = 1
LAYOUTS: dict[str, dict[str, Any]] = {
    # How layers are cut has its own tests.
    "cut": {**BOTH, "sequence_parallel": True, "self_check": False},
    "interleaved": {**PP2, "schedule": "Interleaved1F1B"},
    "v": {**PP2, "schedule": "ZBVZeroBubble"},
    "stages": {"pipeline_parallel_size": 4, "tensor_parallel_size": 1, "microbatches": 4},
}


def strategy(name: str) -> Any:
    return FSDPBF16Strategy("32-true") if name == "fsdp" else TensorPipelineStrategy("32-true", **LAYOUTS[name])


def first_half(kind: str, path: Path, chosen: Any = "auto", **kwargs: Any) -> None:
    module = FullModule(kind, layers=LAYERS)
    train(module, chosen, max_steps=HALF, **kwargs)
    module.trainer.save_checkpoint(path)


def second_half(kind: str, path: Path, chosen: Any = "auto", **kwargs: Any) -> Numbers:
    settings = {**SHORT, "num_sanity_val_steps": 0, **kwargs}
    return train(FullModule(kind, layers=LAYERS), chosen, ckpt_path=str(path), **settings)


def evaluate(kind: str, path: Path, **kwargs: Any) -> float:
    results = quiet_trainer(**kwargs).validate(FullModule(kind, layers=LAYERS), ckpt_path=str(path), verbose=False)
    return results[0]["val_loss"]


# The tests stop in the middle of an epoch on purpose; each run then starts the data anew.
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


@pytest.mark.parametrize(
    ("kind", "saved", "resumed"),
    [("llama", "cut", ["fsdp", "v"]), ("qwen3", "v", ["cut", "stages"]), ("qwen3", "fsdp", ["interleaved", "cut"])],
)
def test_any_layout_resumes_what_any_other_has_saved(kind: str, saved: str, resumed: list[str], tmp_path: Path) -> None:
    first_half(kind, tmp_path / "plain.ckpt", devices=1)
    expected = second_half(kind, tmp_path / "plain.ckpt", devices=1)
    evaluated = evaluate(kind, tmp_path / "plain.ckpt", devices=1)
    save_and_resume(kind, saved, resumed, expected, evaluated, tmp_path)
    on_one_rank(kind, expected, tmp_path)
    assert_merged(kind, tmp_path)


@ranks(4)
def save_and_resume(
    kind: str, saved: str, resumed: list[str], expected: Numbers, evaluated: float, folder: Path
) -> None:
    first_half(kind, folder / "ours.ckpt", strategy(saved))
    for name in resumed:
        found = second_half(kind, folder / "ours.ckpt", strategy(name))
        errors = [abs(a - b) for a, b in zip(found.flat(), expected.flat(), strict=True)]
        assert max(errors) <= FIVE_DECIMALS, (name, found, expected)
    # An ordinary file of Lightning holds what all stages have.
    loss = evaluate(kind, folder / "plain.ckpt", strategy=strategy(resumed[-1]))
    assert loss == pytest.approx(evaluated, abs=FIVE_DECIMALS)


@ranks(1)
def on_one_rank(kind: str, expected: Numbers, folder: Path) -> None:
    found = second_half(kind, folder / "ours.ckpt", FSDPBF16Strategy("32-true"))
    assert found.flat() == pytest.approx(expected.flat(), abs=FIVE_DECIMALS)
    assert dist.get_world_size() == 1


def assert_merged(kind: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    manifest = read_manifest(folder / "ours.ckpt")
    assert manifest.huggingface == "model"
    names = {name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")}
    plain = torch.load(folder / "plain.ckpt", weights_only=False)["state_dict"]
    assert names | set(manifest.tied) == plain.keys()
    merge_checkpoint(folder / "ours.ckpt", folder / "merged")
    model = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32)
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, value in plain.items():
        # Two steps of AdamW in another order of float32 sums.
        assert torch.allclose(weights[name], value, atol=2e-5), name


@pytest.mark.slow
def test_export_is_verified_against_the_pipeline_and_merge_writes_the_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export_on_four_ranks(tmp_path)
    exported, merged = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("exported", "merged")
    )
    assert exported.keys() == merged.keys()
    for name, value in exported.items():
        assert torch.equal(value, merged[name]), name


@ranks(4)
def export_on_four_ranks(folder: Path) -> None:
    export = ExportForInference(str(folder / "exported"), dtype=None)
    callbacks = [
        ShardedCheckpoint(dirpath=str(folder / "checkpoints"), every_n_train_steps=HALF),
        MergeShardedCheckpoint(str(folder / "merged")),
        export,
    ]
    module = FullModule("qwen3", layers=LAYERS)
    with reload_here():
        train(module, strategy("cut"), max_steps=HALF, callbacks=callbacks, enable_checkpointing=True)
    assert export.report is not None
    assert export.report.verified
