"""What the planner writes for ZeRO runs as it was written, by the command itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.ranks import ranks
from tests.planner.recipes import fit, write_tiny

pytestmark = pytest.mark.usefixtures("ops")


@ranks(2)
def planned_on_two_ranks(folder: str) -> None:
    place = Path(folder)
    trainer = fit(place, {"loss": "chunked", "chunk": 32}, "zero2", {"offload": "optimizer"})
    assert (trainer.strategy.stage, trainer.strategy.options.offload_optimizer) == (2, "cpu")
    trainer = fit(place, {"optimizer": "adamw_fused"}, "zero3", {"offload": "cpu"})
    assert trainer.strategy.config["zero_optimization"]["offload_param"]["device"] == "cpu"
    trainer = fit(place, {"goal": "qlora"}, "zero3", {"offload": "cpu"})
    assert type(trainer.strategy).__name__ == "ZeRO3QLoRAStrategy"
    assert trainer.strategy.stage == 3


def test_planned_recipes_run(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    planned_on_two_ranks(str(tmp_path))
