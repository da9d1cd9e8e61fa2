"""Imports go one way, and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_swift"
# A folder may import from its own level and from those before it.
LEVELS = [
    ["errors", "_registration", "_shipped", "_version"],
    ["parallel", "adapters", "planner", "checkpoint"],
    ["models", "data"],
    ["strategies"],
    ["callbacks"],
    [
        *["cli", "_commands", "_training_cli", "__main__"],
        *["_config_check", "_config_sources", "_dry_run", "_plan_command", "_reasons", "_signatures", "_tiny"],
    ],
]
NO_LIGHTNING = {"parallel", "adapters", "planner", "checkpoint"}
OPTIONAL = {"deepspeed", "bitsandbytes", "peft", "datasets"}
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[str, ast.AST]]:
    tree = ast.parse(path.read_text())
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.append((node.module, node))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    me = unit(path)
    if me == "__init__":
        return
    for module, _ in imports(path):
        if module.startswith("lightning_swift."):
            other = module.split(".")[1]
            assert LEVEL[other] <= LEVEL[me], f"{path.name} imports {module}"
        if me in NO_LIGHTNING:
            assert module.split(".")[0] not in {"lightning", "pytorch_lightning"}, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_dependencies_are_imported_inside_functions(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    for node in top:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        assert not {n.split(".")[0] for n in names} & OPTIONAL


@pytest.mark.parametrize(
    "statement", ["import lightning_swift", "import lightning_swift.checkpoint.merge", "import lightning_swift.cli"]
)
def test_these_imports_load_neither_torch_nor_lightning(statement: str) -> None:
    code = f"import sys; {statement}; print(sorted({{'torch', 'lightning', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


ORDERS = """
import os, sys
# What Lightning itself imports, so that it is loaded once and not by each of the processes.
import torch, torchmetrics

assert "lightning" not in sys.modules
for order in ("lightning_swift, lightning.pytorch", "lightning, lightning_swift", "lightning.pytorch, lightning_swift"):
    process = os.fork()
    if not process:
        exec(f"import {order}")
        from lightning.pytorch.strategies import StrategyRegistry

        print(order, "swift_fsdp_bf16" in StrategyRegistry, flush=True)
        os._exit(0)
    os.waitpid(process, 0)
"""


def test_strategy_names_are_registered_whatever_the_order_of_imports() -> None:
    result = subprocess.run([sys.executable, "-c", ORDERS], capture_output=True, text=True, check=True)
    assert [line.rpartition(" ")[2] for line in result.stdout.splitlines()] == ["True"] * 3, result.stdout
