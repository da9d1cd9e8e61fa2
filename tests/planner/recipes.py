"""Recipes that the planner writes, one for each way of training, and a run of one on CPU ranks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from lightning_swift.planner.recipe import recipe_text, write_recipe
from lightning_swift.planner.search import Candidate, Limits, search
from lightning_swift.planner.settings import Job
from tests.harness.models import save_tiny_model
from tests.harness.tokenizers import tiny_tokenizer
from tests.planner.jobs import job

__all__ = ["QUESTIONS", "candidate", "fit", "text_for", "write_tiny"]

# Name -> model, card, the rest of the question, strategy, and what the layout has to have.
QUESTIONS: dict[str, tuple[str, str, dict[str, Any], Any, dict[str, Any]]] = {
    "ddp": ("llama-3.2-1b", "a100-80", {"gpus": 4, "global_batch": 64}, "ddp", {}),
    "qlora, 8 bits": ("llama-3-8b", "a10", {"goal": "qlora", "optimizer": "adamw_8bit"}, "ddp", {}),
    "fsdp": ("llama-3-8b", "a100-80", {"gpus": 8, "loss": "chunked", "optimizer": "adamw_fused"}, "fsdp", {}),
    "hsdp": ("llama-3-8b", "a100-80", {"gpus": 8, "nodes": 2}, "fsdp", {"replicate": 2}),
    "fsdp, host": ("llama-3-8b", "a100-80", {"gpus": 8, "goal": "pretrain"}, "fsdp", {"offload": "cpu"}),
    "zero1": ("qwen3-4b", "h100", {"gpus": 8, "precision": "bf16-true"}, "zero1", {}),
    "zero2": ("llama-3-8b", "h100", {"gpus": 8, "goal": "lora", "dropout": True}, "zero2", {"offload": "none"}),
    "zero2, host": ("mistral-7b", "a100-80", {"gpus": 8, "loss": "chunked"}, "zero2", {"offload": "optimizer"}),
    "zero3": ("mixtral-8x7b", "h200", {"gpus": 8, "nodes": 4}, "zero3", {"offload": "none"}),
    "zero3, host": ("llama-3-70b", "a100-80", {"gpus": 8, "nodes": 4}, "zero3", {"offload": "cpu"}),
    "zero3, disk": ("llama-3-70b", "a100-80", {"gpus": 8, "nodes": 2}, "zero3", {"offload": "nvme"}),
    "zero3, qlora": ("llama-3-8b", "a10", {"goal": "qlora", "dora": True}, "zero3", {"offload": "cpu"}),
    "tensor": ("llama-3-8b", "h100", {"gpus": 8, "goal": "lora"}, "tp_pp", {"pipeline": 1}),
    "pipeline": ("gemma-2-9b", "h100", {"gpus": 8}, "tp_pp", {"tensor": 1}),
    "both": ("gpt3-175b", "a100-80", {"gpus": 8, "nodes": 32, "goal": "pretrain"}, "tp_pp", {"tensor": 8}),
    "fp32": ("smollm2-135m", "t4", {"precision": "32-true", "goal": "lora", "optimizer": "sgd"}, "ddp", {}),
}


def candidate(question: Job, strategy: Any, has: dict[str, Any], **limits: Any) -> Candidate:
    """The best plan with that strategy and those properties."""
    plans = search(question, Limits(strategy=strategy, **limits)).candidates
    return next(c for c in plans if all(getattr(c.layout, key) == value for key, value in has.items()))


def text_for(name: str) -> tuple[Job, Candidate, str]:
    """Question, plan and recipe of that name."""
    model, card, changes, strategy, has = QUESTIONS[name]
    question = job(model, card, **changes)
    chosen = candidate(question, strategy, has)
    return question, chosen, recipe_text(question, chosen, model)


def write_tiny(folder: Path) -> None:
    """A tiny model with a tokenizer at ``folder/model``, and conversations at ``folder/data/train.jsonl``."""
    words = tiny_tokenizer(pad="<|endoftext|>")
    save_tiny_model(folder / "model", hidden=32, layers=2, vocab=len(words))
    words.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    turns = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three 4"}]
    (folder / "data" / "train.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 64)


def fit(folder: Path, changes: dict[str, Any], strategy: Any, has: dict[str, Any], *more: str) -> Any:
    """Write a recipe for the tiny model in ``folder`` and run two steps of it in this rank, by the command itself.

    Args:
        folder: What :func:`write_tiny` has made.
        changes: The rest of the question, as in ``QUESTIONS``.
        strategy: Its strategy.
        has: What the layout has to have.
        more: Options of the command.

    Returns:
        The Trainer, after training.
    """
    from lightning_swift._training_cli import TrainingCLI

    os.chdir(folder)
    question = job("model", gpus=torch.distributed.get_world_size(), length=64, **changes)
    chosen = candidate(question, strategy, has, batch=2)
    recipe = folder / f"rank{torch.distributed.get_rank()}.yaml"
    write_recipe(recipe, recipe_text(question, chosen, "model"))
    options = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.logger=false", "--data.num_workers=0"]
    trainer = TrainingCLI(["fit", "--config", str(recipe), *options, *more]).trainer
    assert trainer.global_step == 2
    assert math.isfinite(trainer.callback_metrics["train_loss"])
    assert trainer.lightning_module.hparams["loss"] == question.loss
    return trainer
