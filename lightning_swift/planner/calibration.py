"""What earlier runs measured against what was predicted for them: a small JSON file, kept per kind of card."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Calibration", "Record", "calibration_file", "read_calibration", "record_run"]

_VARIABLE = "LIGHTNING_SWIFT_CALIBRATION"
# Older runs say less about the versions installed now.
_KEPT = 50
# A ratio outside of this is a run that was something else than what was predicted.
_PLAUSIBLE = (0.5, 2.0)


@dataclass(frozen=True)
class Record:
    """One run.

    Args:
        gpu: Product name of the card.
        strategy: Name of the strategy.
        predicted: Predicted peak in bytes, before any calibration.
        measured: Peak that PyTorch's allocator reported, in bytes.
    """

    gpu: str
    strategy: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class Calibration:
    """What to multiply predictions by.

    Args:
        ratio: Median of measured over predicted; 1 without runs.
        runs: Number of runs it rests on.
    """

    ratio: float = 1.0
    runs: int = 0

    def __str__(self) -> str:
        if not self.runs:
            return "not calibrated: no run on this kind of card is recorded"
        return f"multiplied by {self.ratio:.3f}, which {self.runs} recorded run(s) on this kind of card measured"


def calibration_file() -> Path:
    """Where records are kept; the environment variable LIGHTNING_SWIFT_CALIBRATION names another place."""
    given = os.environ.get(_VARIABLE)
    if given:
        return Path(given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "lightning_swift" / "memory.json"


def read_calibration(gpu: str, path: Path | None = None) -> Calibration:
    """The calibration for a card, from the records of runs on cards of the same name."""
    ratios = [record.measured / record.predicted for record in _read(path or calibration_file()) if record.gpu == gpu]
    ratios = [ratio for ratio in ratios if _PLAUSIBLE[0] <= ratio <= _PLAUSIBLE[1]]
    return Calibration(statistics.median(ratios), len(ratios)) if ratios else Calibration()


def record_run(record: Record, path: Path | None = None) -> None:
    """Add a run; the file is replaced at once, so that a reader never sees half of it.

    Raises:
        OSError: The file cannot be written.
    """
    path = path or calibration_file()
    records = [*_read(path), record][-_KEPT:]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps([asdict(item) for item in records], indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> list[Record]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Record(**item) for item in found if item["predicted"] > 0]
    except (OSError, ValueError, TypeError, KeyError):
        # Absent, or not ours: a plan without calibration is better than none.
        return []
