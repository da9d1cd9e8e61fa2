"""Every shipped recipe runs through the real command on a tiny model (`--dry_run true`); one in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_swift._shipped import recipes
from tests.harness.commands import DEADLINE, run_command

RECIPES = [recipe.name for recipe in recipes()]


def in_fresh_interpreters(
    arguments: list[str], folder: Path, *, output: Path, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """What users start, and what Lightning starts from it."""
    return subprocess.run(
        [sys.executable, "-m", "lightning_swift", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def dry_run(arguments: list[str], folder: Path, *, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    places = {name: folder / name for name in ("work", "output", "temporary")}
    for place in places.values():
        place.mkdir()
    run = in_fresh_interpreters if fresh else run_command
    result = run(
        [*arguments, "--dry_run", "true"],
        places["work"],
        output=places["output"],
        env={"TMPDIR": str(places["temporary"])},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    # Nothing is left: neither the temporary folder nor the places that the recipe itself would write to.
    assert not list(places["temporary"].glob("lightning-swift*"))
    assert not list(places["work"].iterdir())
    return result


@pytest.mark.slow
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_saves_and_exports(name, tmp_path):
    # One rank shows what a recipe does with one device; the others show the ranks together.
    ranks = 1 if name in ("sft_fsdp", "qlora_a10_llama3_8b") else 2
    result = dry_run(["fit", "--config", name, "--trainer.devices", str(ranks)], tmp_path, fresh=name == "quickstart")
    assert "`max_steps=2` reached" in result.stderr
    # A dry run of two copies of the model is on two ranks what it is on two machines.
    assert ("dp_replicate 2" in result.stderr) == (name == "sft_hsdp")
    assert f"MEMBER: {ranks}/{ranks}" in result.stderr


@pytest.mark.slow
def test_an_error_on_two_ranks_is_a_line_from_each_and_no_success(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{\n")
    arguments = ["fit", "--config", "quickstart", "--dry_run", "true", "--data.train", "bad.jsonl"]
    result = run_command(arguments, tmp_path, output=tmp_path, env={"TMPDIR": str(tmp_path)})
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
