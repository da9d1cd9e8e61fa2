"""What ``import lightning_swift`` adds to ``import lightning``, and what the torch-free commands cost to start.

Medians of fresh processes, the contenders taking turns. ``python -m benchmarks.import_time``
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.launch import table

BASE = "import lightning"
CONTENDERS = {
    BASE: BASE,
    "import lightning, lightning_swift": "import lightning, lightning_swift",
    "import lightning_swift": "import lightning_swift",
    "import lightning_swift.checkpoint.merge": "import lightning_swift.checkpoint.merge",
}


def main() -> None:
    """Time each import in fresh processes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(args.rounds):
        for name, statement in CONTENDERS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True)
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, values in seconds.items():
        added = statistics.median(v - b for v, b in zip(values, seconds[BASE], strict=True))
        rows.append((name, f"{statistics.median(values):.2f}", f"{added:+.2f}"))
    table(f"Import time, median of {args.rounds} fresh processes", ["statement", "seconds", "added to lightning"], rows)


if __name__ == "__main__":
    main()
