"""The launch scripts for torchrun and SLURM: valid bash, executable, and naming recipes and options that exist."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from lightning_swift._shipped import recipes, shipped_folder

SCRIPTS = sorted([*shipped_folder("configs").glob("slurm/*.sh"), *shipped_folder("configs").glob("torchrun/*.sh")])
RECIPES = {recipe.name for recipe in recipes()}


def test_there_are_scripts_for_both_launchers():
    assert {path.parent.name for path in SCRIPTS} == {"slurm", "torchrun"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_script_is_bash_and_names_recipes_that_exist(path):
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert os.access(path, os.X_OK)
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    named = re.findall(r"--config (\w+)", text) + re.findall(r'RECIPE="\$\{1:-(\w+)\}"', text)
    assert named
    assert set(named) <= RECIPES
    # A run that is started again must go on and not begin anew.
    assert "--ckpt_path newest" in text


def started(path, arguments, tmp_path, **environment):
    """What the script would run: stand-ins for the launchers write their arguments, one a line."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("torchrun", "srun"):
        (programs / name).write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
        (programs / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment}
    done = subprocess.run(["bash", str(path), *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_options_reach_the_command_and_the_ranks_agree(path, tmp_path):
    recipe = [] if path.parent.name == "slurm" else ["lora_ddp"]
    words = started(path, [*recipe, "--trainer.max_steps", "3"], tmp_path, GPUS="4", MACHINES="2", HEAD="a:1")
    assert words[-3:] == ["--trainer.max_steps", "3", ""]
    assert "fit" in words
    if recipe:
        assert words[words.index("--config") + 1] == "lora_ddp"
        assert words[words.index("--nproc-per-node") + 1] == words[words.index("--trainer.devices") + 1] == "4"
    nodes = re.search(r"#SBATCH --nodes=(\d+)", path.read_text())
    if nodes is not None and int(nodes[1]) > 1:
        assert words[words.index("--trainer.num_nodes") + 1] == nodes[1]
