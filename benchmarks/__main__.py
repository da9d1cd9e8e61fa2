"""Run every benchmark: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

SCRIPTS = ("import_time", "step_time", "memory", "merge", "zero", "qlora", "pipeline", "chunked_loss")


def main() -> int:
    """Run the scripts one after the other; the exit code is that of the first that fails."""
    for script in SCRIPTS:
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{script}"], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
