"""Start a worker module under torchrun on CPU and collect what its rank 0 reports; print tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
REPORT = "SWIFT_BENCHMARK_REPORT"


def torchrun(module: str, ranks: int, arguments: Sequence[str]) -> Any:
    """Run ``module`` in ``ranks`` processes of one thread each; return the JSON that :func:`report` wrote."""
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as folder:
        path = Path(folder) / "report.json"
        env = {
            **os.environ,
            REPORT: str(path),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*command, "-m", module, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{module} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return json.loads(path.read_text())


def report(value: Any) -> None:
    """Hand a JSON value from rank 0 of a worker to the launcher."""
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ[REPORT]).write_text(json.dumps(value))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table, the first column left-aligned and figures right-aligned."""
    view = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        view.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        view.add_row(*row)
    Console(width=120).print(view)
