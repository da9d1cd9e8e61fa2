"""Contenders that take turns in processes of their own, and ratios taken within a round: what step times are made of.

A process of its own for each, because what one sets in its process (the memory allocator, say) would help or hinder
the others. The order changes from round to round. CPU seconds are those of one rank; on a busy machine they say more
than the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.launch import report, torchrun

WARM_UP = 2

Rounds = list[dict[str, dict[str, float]]]


@dataclass
class Clock:
    """Wall and CPU time at the end of each step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def tick(self) -> None:
        """Note the end of a step."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def report(self) -> None:
        """Hand the median step to the launcher."""
        report({"wall": _median_gap(self.wall), "cpu": _median_gap(self.cpu)})


def take_turns(module: str, names: Sequence[str], *, ranks: int, rounds: int, arguments: Sequence[str]) -> Rounds:
    """Run every contender once in each round, as ``python -m module NAME ARGUMENTS`` on ``ranks`` CPU ranks."""
    results: Rounds = []
    for index in range(rounds):
        turn = index % len(names)
        order = [*names[turn:], *names[:turn]]
        results.append({name: torchrun(module, ranks, [name, *arguments]) for name in order})
    return results


def row(name: str, label: str, rounds: Rounds, baselines: Mapping[str, str]) -> tuple[str, ...]:
    """Seconds of a step and their ratio to the baseline of ``name``, medians over the rounds; and the ratios' range."""
    wall, cpu = ([r[name][kind] / r[baselines[name]][kind] for r in rounds] for kind in ("wall", "cpu"))
    seconds: Any = [statistics.median(r[name][kind] for r in rounds) for kind in ("wall", "cpu")]
    return (
        label,
        f"{seconds[0]:.3f}",
        f"{statistics.median(wall):.3f}",
        f"{min(wall):.3f} to {max(wall):.3f}",
        f"{seconds[1]:.3f}",
        f"{statistics.median(cpu):.3f}",
    )


def _median_gap(marks: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(marks[WARM_UP - 1 :], marks[WARM_UP:], strict=False))
