"""What ``plan --output`` writes: the classes, their arguments and what the user is told; and two steps of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_swift
from lightning_swift import CausalLM, callbacks
from lightning_swift.adapters.settings import LoraSettings
from lightning_swift.checkpoint.export import export_checkpoint
from lightning_swift.planner.search import Limits, search
from lightning_swift.strategies.ddp import DDPBF16Strategy
from lightning_swift.strategies.fsdp import FSDPBF16Strategy
from lightning_swift.strategies.tensor_pipeline import TensorPipelineStrategy
from tests.harness.exports import reload_here
from tests.harness.models import tiny_config
from tests.harness.ranks import ranks
from tests.planner.jobs import job
from tests.planner.recipes import QUESTIONS, candidate, fit, text_for, write_tiny


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_recipe_names_classes_and_arguments_that_exist(name: str) -> None:
    question, chosen, text = text_for(name)
    recipe = yaml.safe_load(text)
    model, trainer = recipe["model"]["init_args"], recipe["trainer"]
    strategy = trainer["strategy"]
    arguments = dict(strategy["init_args"])
    if "lora" in arguments:
        arguments["lora"] = LoraSettings(**arguments["lora"])
    getattr(lightning_swift, strategy["class_path"].rpartition(".")[2])(**arguments)
    for callback in trainer["callbacks"]:
        getattr(callbacks, callback["class_path"].rpartition(".")[2])(**callback["init_args"])
    module = CausalLM(**{**model, "path_or_config": tiny_config(layers=1)})
    # What was predicted is what runs.
    assert (module.hparams["loss"], module.hparams["optimizer"]) == (question.loss, question.optimizer)
    assert module.hparams["loss_chunk"] == question.chunk
    assert (arguments.get("quantization"), "lora" in arguments) in {
        "qlora": {("nf4", True)} if "QLoRA" not in strategy["class_path"] else {(None, True)},
        "lora": {(None, True)},
    }.get(question.goal, {(None, False)})
    assert recipe["data"]["init_args"]["batch_size"] == chosen.layout.batch
    assert f"models/{QUESTIONS[name][0]}" == model["path_or_config"]
    assert f"at {model['path_or_config']}." in text


def test_the_user_is_told_what_to_do_first(tmp_path: Path) -> None:
    from lightning_swift.planner.recipe import recipe_text

    config = tmp_path / "config.json"
    tiny_config().to_json_file(config)
    best = search(job(str(config))).best
    assert best is not None
    assert "Weights are random" in recipe_text(job(str(config)), best, str(config))
    assert "Weights are random" not in recipe_text(job(str(config), goal="pretrain"), best, str(config))
    assert "Put the model's folder" not in recipe_text(job(str(tmp_path)), best, str(tmp_path))
    kept = recipe_text(job(str(config), loss="huggingface_kept", optimizer_in_backward=True), best, str(config))
    assert "drops it and needs less" in kept
    assert "has none and needs more" in kept
    assert "change /local_nvme" in text_for("zero3, disk")[2]


@pytest.mark.parametrize(
    ("changes", "strategy", "words"),
    [
        ({"goal": "qlora"}, "fsdp", "by ZeRO only"),
        ({"loss": "chunked"}, "tp_pp", "the head and the layers"),
        ({"optimizer": "adamw_8bit"}, "zero2", "whole parameters"),
        ({"goal": "lora", "dora": True}, "tp_pp", "DoRA"),
    ],
)
def test_what_no_strategy_does_is_not_recommended(changes: dict[str, Any], strategy: Any, words: str) -> None:
    plan = search(
        job("llama-3.2-1b", gpus=2, **changes), Limits(strategy=strategy, tensor=2 if "dora" in changes else None)
    )
    assert plan.best is None
    assert any(words in item.reason for item in plan.rejected)
    layouts = [candidate.layout for candidate in search(job("llama-3.2-1b", gpus=2, **changes)).candidates]
    assert layouts
    assert all(layout.strategy != strategy or "dora" in changes for layout in layouts)


def test_levers_name_only_what_can_be_had() -> None:
    question = job("llama-3.2-1b", gpus=8)
    words = {
        strategy: " ".join(lever.name for lever in candidate(question, strategy, {}, batch=8).levers(question))
        for strategy in ("ddp", "fsdp", "tp_pp")
    }
    assert [strategy for strategy, names in words.items() if "8-bit" in names] == ["ddp"]
    assert [strategy for strategy, names in words.items() if "QLoRA" in names] == ["ddp"]
    assert [strategy for strategy, names in words.items() if "in chunks" in names] == ["ddp", "fsdp"]


@ranks(2)
def planned_on_two_ranks(folder: str) -> None:
    place = Path(folder)
    eight = {"goal": "qlora", "optimizer": "adamw_8bit", "loss": "chunked", "chunk": 32}
    trainer = fit(place, eight, "ddp", {})
    assert isinstance(trainer.strategy, DDPBF16Strategy)
    assert type(trainer.optimizers[0]).__name__ == "AdamW8bit"
    trainer = fit(place, {"loss": "chunked", "optimizer": "adamw_fused"}, "fsdp", {"offload": "cpu"})
    assert isinstance(trainer.strategy, FSDPBF16Strategy)
    assert trainer.optimizers[0].param_groups[0]["fused"]
    trainer = fit(place, {"goal": "lora"}, "tp_pp", {"pipeline": 2})
    assert isinstance(trainer.strategy, TensorPipelineStrategy)


@pytest.mark.slow
def test_planned_recipes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    planned_on_two_ranks(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # The last run had adapters on a BF16 copy of the folder's FP32 weights: an export of them is allowed to round.
    last = max(Path("runs/planned/checkpoints").glob("step-2*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    with reload_here():
        report = export_checkpoint(last, tmp_path / "adapter", format="adapter")
    assert report.max_logit_gap is not None
    assert report.max_logit_gap > 0
