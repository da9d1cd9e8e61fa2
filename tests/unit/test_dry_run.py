"""What a dry run changes in a recipe, without running one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_swift._dry_run import DryRun
from lightning_swift._tiny import shrink_config, write_tiny_folder, write_tiny_text
from lightning_swift.errors import ConfigurationError


def config(**trainer: Any) -> dict[str, Any]:
    return {
        "model": {"class_path": "CausalLM", "init_args": {"path_or_config": "nowhere", "tokenizer": None}},
        "data": {
            "class_path": "ChatDataModule",
            "init_args": {"train": "a.jsonl", "validation": None, "max_length": 4096, "batch_size": 16},
        },
        "trainer": {
            "devices": 8,
            "accumulate_grad_batches": 4,
            "strategy": {"init_args": {"data_parallel_replicate": 4, "data_parallel_shard": 2, "compile": "inductor"}},
            "callbacks": [{"init_args": {"dirpath": "/x/checkpoints", "every_n_train_steps": 100}}],
            "logger": False,
            **trainer,
        },
        "ckpt_path": "newest",
    }


@pytest.fixture
def shrunk(request) -> Any:
    run = DryRun()
    values = config(**getattr(request, "param", {}))
    run.shrink(values)
    yield values
    run.finish()


def test_sizes_places_and_sources_change_and_nothing_else(shrunk):
    trainer, data = shrunk["trainer"], shrunk["data"]["init_args"]
    folder = trainer["default_root_dir"]
    assert (trainer["devices"], trainer["num_nodes"], trainer["max_steps"]) == (2, 1, 2)
    assert trainer["limit_train_batches"] == 2 * trainer["accumulate_grad_batches"] == 4
    strategy = trainer["strategy"]["init_args"]
    assert strategy == {"data_parallel_replicate": 2, "data_parallel_shard": "auto", "compile": "aot_eager"}
    assert trainer["callbacks"][0]["init_args"] == {"dirpath": f"{folder}/checkpoints", "every_n_train_steps": 1}
    assert (data["max_length"], data["batch_size"], data["validation"]) == (256, 2, None)
    assert Path(data["train"]).parent == Path(folder)
    assert shrunk["ckpt_path"] is None
    assert shrunk["model"]["init_args"]["path_or_config"] == f"{folder}/model"


@pytest.mark.parametrize(
    ("devices", "few"), [(1, 1), (8, 2), ("auto", 2), ("-1", 2), ("1", 1), ([0], 1), ([0, 3, 4], 2), ("0,1", 2)]
)
def test_at_most_two_devices(devices, few):
    run = DryRun()
    values = config(devices=devices)
    run.shrink(values)
    run.finish()
    assert values["trainer"]["devices"] == few


def test_the_folder_is_gone_afterwards_and_shared_meanwhile():
    owner = DryRun()
    folder = os.environ["LIGHTNING_SWIFT_DRY_RUN"]
    child = DryRun()
    child.finish()
    assert Path(folder).is_dir()
    owner.finish()
    assert not Path(folder).exists()
    assert "LIGHTNING_SWIFT_DRY_RUN" not in os.environ


def test_processes_that_could_not_share_it_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="torchrun"):
        DryRun()


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24},
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
        {"model_type": "mistral", "hidden_size": 4096, "sliding_window": 4096, "quantization_config": {"bits": 4}},
        {
            "model_type": "gemma2",
            "num_hidden_layers": 26,
            "layer_types": ["sliding_attention", "full_attention"] * 13,
        },
        {"model_type": "mixtral", "num_hidden_layers": 32, "num_local_experts": 8},
    ],
    ids=lambda s: s["model_type"],
)
def test_a_tiny_model_of_the_same_architecture(settings, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # The size of a vocabulary is the tokenizer's, not the architecture's.
    sentence = write_tiny_folder({**settings, "vocab_size": 300}, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == settings["model_type"]
    assert model.config.num_hidden_layers == 2
    assert model.num_parameters() < 1_000_000
    assert "of the recipe's own architecture" in sentence
    chat = [{"role": "user", "content": "What is héllo?"}, {"role": "assistant", "content": "A word."}]
    ids = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, return_dict=True)["input_ids"]
    assert max(ids) < model.config.vocab_size


def test_kinds_of_layers_and_nested_configurations_are_kept():
    small = shrink_config(
        {
            "layer_types": ["a", "a", "b", "a"],
            "num_hidden_layers": 4,
            "text_config": {"hidden_size": 999},
            "n_inner": None,
        }
    )
    assert small["layer_types"] == ["a", "b"]
    assert small["text_config"] == {"hidden_size": 64}
    assert small["n_inner"] is None


def test_text_is_the_users_own_where_there_is_any(tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps({"text": str(i)}) + "\n" for i in range(1000)))
    write_tiny_text(own, tmp_path / "copy.jsonl")
    assert (tmp_path / "copy.jsonl").read_text() == "".join(own.read_text().splitlines(keepends=True)[:64])
    write_tiny_text(tmp_path / "missing.jsonl", tmp_path / "made.jsonl")
    assert len((tmp_path / "made.jsonl").read_text().splitlines()) == 64
