"""Every shipped recipe runs through the real command on a tiny model (`--dry_run true`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swift._shipped import recipes

# A run starts Python, Lightning and two ranks: half a minute where cores are shared.
DEADLINE = 10 * float(os.environ.get("LIGHTNING_SWIFT_TEST_DEADLINE", "30"))
RECIPES = [recipe.name for recipe in recipes()]


def dry_run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "lightning_swift", *arguments, "--dry_run", "true"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    # Nothing is left: neither the temporary folder nor the places that the recipe itself would write to.
    assert [path.name for path in temporary.iterdir() if path.name.startswith("lightning-swift")] == []
    assert [path.name for path in folder.iterdir()] == ["tmp"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_saves_and_exports(name, tmp_path):
    # One rank shows what a recipe does with one device; the others show the ranks together.
    ranks = 1 if name in ("sft_fsdp", "qlora_a10_llama3_8b") else 2
    result = dry_run(["fit", "--config", name, "--trainer.devices", str(ranks)], tmp_path)
    assert "`max_steps=2` reached" in result.stderr
    # A dry run of two copies of the model is on two ranks what it is on two machines.
    assert ("dp_replicate 2" in result.stderr) == (name == "sft_hsdp")
    assert f"MEMBER: {ranks}/{ranks}" in result.stderr


@pytest.mark.slow
def test_an_error_on_two_ranks_is_a_line_from_each_and_no_success(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{\n")
    arguments = ["fit", "--config", "quickstart", "--dry_run", "true", "--data.train", "bad.jsonl"]
    result = subprocess.run(
        [sys.executable, "-m", "lightning_swift", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert result.returncode != 0
    assert "\nerror: " in result.stderr
    assert "\n[rank 1] error: " in result.stderr
    assert "line is not JSON" in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("lightning-swift")] == []


@pytest.mark.slow
def test_a_strategy_by_its_registered_name_and_classes_by_short_names(tmp_path):
    arguments = ["--model", "CausalLM", "--model.path_or_config", "m", "--data", "ChatDataModule", "--data.train", "d"]
    trainer = [
        "--trainer.strategy",
        "swift_fsdp_bf16",
        "--trainer.devices",
        "1",
        "--trainer.enable_checkpointing=false",
    ]
    result = dry_run(["fit", *arguments, *trainer, "--trainer.logger=false"], tmp_path)
    assert "FSDPBF16Strategy: bf16-mixed" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_the_other_commands_run_too(command, tmp_path):
    result = dry_run(
        [
            command,
            "--config",
            "sft_fsdp",
            "--trainer.devices",
            "1",
            "--data.test",
            "t.jsonl",
            "--data.predict",
            "p.jsonl",
        ],
        tmp_path,
    )
    assert "test_loss" in result.stdout or command != "test"
    assert "val_loss" in result.stdout or command != "validate"
